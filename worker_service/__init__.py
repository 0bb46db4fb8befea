"""One worker per device: weights, device memory, sampling, restore and write-back."""

from splitpoint.host.processor import bound_primitive_caches, wait_briefly

# Before anything of this package imports torch. `splitpoint up` lets workers spin longer that
# have their cores to themselves.
wait_briefly()
bound_primitive_caches()
