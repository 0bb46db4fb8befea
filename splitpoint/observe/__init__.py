"""Logs, traces and metrics of every process."""
