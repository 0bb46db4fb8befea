"""Which worker runs a request: footprint, admission, routing, and retries."""
