"""`splitpoint bench offload`: decoding with the cache on the host."""
