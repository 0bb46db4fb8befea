"""Policy without I/O: admission, accounts of device memory, routing, and plans."""
