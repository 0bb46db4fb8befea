"""A client's request: its validation, its state, and its output."""
