"""The gateway: OpenAI-compatible HTTP over the scheduler's gRPC. It writes no file."""
