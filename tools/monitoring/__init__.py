"""Dashboards as data, and the run that tries every query on a real stack."""
