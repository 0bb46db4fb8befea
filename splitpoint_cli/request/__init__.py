"""Commands that ask a running stack: generate, status, probe."""
