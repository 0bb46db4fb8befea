"""The disk tier: segment files of chunks, their format, and their recovery."""
