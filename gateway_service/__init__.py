"""The gateway: OpenAI-compatible HTTP over the scheduler's gRPC. It keeps no state."""
