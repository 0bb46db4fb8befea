"""Measurements beside peers; see docs/measurements.md."""
