"""Fetches of prefixes into the worker's own store, from its tiers and from other stores."""
