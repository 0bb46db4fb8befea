"""Processes with limits, which do for a service what may take too long or too much memory."""
