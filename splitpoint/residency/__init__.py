"""Residency by rates: resident, waves, time slices and streaming, compared by prediction."""
