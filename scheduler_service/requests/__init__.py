"""The life of a request in the scheduler: arrival, queue, attempts, failover, and its end."""
