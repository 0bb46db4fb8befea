"""Model weights: loaded from checkpoints, kept on the device or streamed from the host."""
