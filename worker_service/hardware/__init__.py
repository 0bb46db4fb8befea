"""Readings of GPU, link and power counters for metrics and traces."""
