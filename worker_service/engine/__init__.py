"""The step loop: running sequences, their pages and tokens, and restores of cached prefixes."""
