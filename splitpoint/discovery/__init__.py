"""Service discovery through Redis, and the circuit breaker for its outages."""
