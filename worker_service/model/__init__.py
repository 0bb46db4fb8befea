"""The decoder of each model family: configuration, layers, attention and the forward pass."""
