"""Kernels of CPU workers: compiled on their host, and the choice among those that there are."""
