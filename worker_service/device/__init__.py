"""Device memory: the paged cache, pinning, budgets, and the measured costs of the device."""
