"""The chunk pool: slots, leases, the prefix index, and sealing."""
