"""The overlap pipeline: copies cached chunks while the device recomputes others."""
