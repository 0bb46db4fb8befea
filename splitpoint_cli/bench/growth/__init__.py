"""splitpoint bench growth: a cache that grows row by row, by buckets, at once, and by pages."""
