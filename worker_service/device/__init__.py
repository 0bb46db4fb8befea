"""Device memory: the paged cache, pinning, and budgets."""
