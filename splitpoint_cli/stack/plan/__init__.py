"""One host's whole stack as data: its processes, their arguments and addresses."""
