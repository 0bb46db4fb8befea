"""Lanes: ordered queues of copies and computation, as threads or as CUDA streams."""
