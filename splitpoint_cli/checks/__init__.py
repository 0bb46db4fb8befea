"""Checks of this host, its ports and a checkpoint, for `splitpoint doctor` and `up`."""
