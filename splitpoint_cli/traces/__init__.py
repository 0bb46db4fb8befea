"""Traces of requests: read, written, generated with the statistics of published ones, scaled."""
