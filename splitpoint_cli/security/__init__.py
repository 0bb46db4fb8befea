"""Certificates and access tokens."""
