"""The options of the services: each declared once, for their command lines and for `splitpoint`."""
