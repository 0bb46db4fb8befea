"""Residency by rates: waiting for device memory or streaming, compared by prediction."""
