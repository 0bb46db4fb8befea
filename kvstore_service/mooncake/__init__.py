"""The engine of transfers from other stores and of the pool, in processes of its own."""
