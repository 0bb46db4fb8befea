"""Tiers behind the arena: what leaves it, what comes back, and the folders of a disk."""
