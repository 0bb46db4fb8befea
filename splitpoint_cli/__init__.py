"""The command line: the only package that sees all others."""

from splitpoint.openmp import wait_briefly

# Before anything of this package imports torch.
wait_briefly()
