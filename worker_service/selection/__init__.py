"""Screens: they guess which cached tokens a query attends to, and choose what is read."""
