"""Measured costs of a device and its link, and the kappa ratio derived from them."""
