"""Drafters that run a model: the served one on a part of its cache, or a small second one."""
