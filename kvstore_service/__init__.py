"""The KV store: owns the arena, its slots, leases and prefix index."""
