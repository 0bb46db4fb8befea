"""One worker per device: weights, device memory, sampling, restore and write-back."""

from splitpoint.host.openmp import wait_briefly
from splitpoint.host.primitive_caches import bound_primitive_caches

# Before anything of this package imports torch. `splitpoint up` lets workers spin longer that
# have their cores to themselves.
wait_briefly()
bound_primitive_caches()
