"""Eviction policies, watermarks, and which chunks are worth storing."""
