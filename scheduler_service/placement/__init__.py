"""Policy without I/O: admission, routing, footprint, plans, and failover."""
