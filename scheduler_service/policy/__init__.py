"""Chooses which waiting request starts next: admission, order, fair shares and best sets."""
