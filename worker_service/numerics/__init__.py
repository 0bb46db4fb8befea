"""Numerics: a check at the start whether any result depends on what is computed beside it."""
