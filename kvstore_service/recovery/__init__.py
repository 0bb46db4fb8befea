"""Adoption of an arena after a restart."""
