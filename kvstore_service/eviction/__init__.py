"""Eviction policies, background eviction by watermarks, and cache admission."""
