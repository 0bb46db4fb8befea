"""Requests as clients send them, and answers as they receive them."""
