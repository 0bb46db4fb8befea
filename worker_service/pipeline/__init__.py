"""The overlap pipeline: copies of cached chunks beside the recomputation of others."""
