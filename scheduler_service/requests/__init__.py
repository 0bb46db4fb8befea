"""The life of a request in the scheduler: arrival, queue, attempts on workers, and its end."""
