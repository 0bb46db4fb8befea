"""Measurements beside peers; see docs/lab/measurements.md."""
