"""The gateway: OpenAI-compatible HTTP over the scheduler's gRPC. Its only files are batches."""
