"""The overlap pipeline: copies cached chunks while the device rebuilds others."""
