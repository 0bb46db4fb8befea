"""The workers and stores that the scheduler knows, and what they report."""
