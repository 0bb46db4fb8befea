"""Our own decoder, and models by transformers' code: layers, attention and the forward pass."""
