"""The command line: the only package that sees all others."""

from splitpoint.host.openmp import wait_briefly
from splitpoint.host.primitive_caches import bound_primitive_caches

# Before anything of this package imports torch.
wait_briefly()
bound_primitive_caches()
