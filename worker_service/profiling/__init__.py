"""Measures the costs of a worker: its link, its device, and its restores."""
