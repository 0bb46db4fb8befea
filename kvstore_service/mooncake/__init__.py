"""Mooncake, in processes of its own: transfers from other stores, and the pool of their memory."""
