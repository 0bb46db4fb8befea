"""/v1/responses: items of input, the request of a body, and its answer as items or events."""
