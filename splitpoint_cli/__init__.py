"""The command line: the only package that sees all others."""

from splitpoint.host.processor import bound_primitive_caches, wait_briefly

# Before anything of this package imports torch.
wait_briefly()
bound_primitive_caches()
