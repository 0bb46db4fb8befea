"""One worker per device: weights, device memory, sampling, restore and write-back."""
