"""`splitpoint bench store`: the store's calls and streams beside Redis and memcpy."""
