"""Chat templates: read from a model folder, and rendered in a process of their own."""
