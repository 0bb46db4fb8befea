"""CUDA graphs: decoding steps that were recorded once for each size and are played back."""
