"""The command line: the only package that sees all others."""
