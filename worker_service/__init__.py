"""One worker per device: weights, device memory, sampling, restore and write-back."""

from splitpoint.openmp import wait_briefly

# Before anything of this package imports torch.
wait_briefly()
