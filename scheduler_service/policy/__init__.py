"""Chooses which waiting request starts next: order, fair shares and best sets."""
