"""Streams of chunk payloads to and from clients on other hosts."""
