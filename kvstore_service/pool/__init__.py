"""The chunk pool: slots, leases and the prefix index."""
