"""HTTP: connections with bounds, and one exchange of a request and its answer."""
