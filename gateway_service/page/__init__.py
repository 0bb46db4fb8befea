"""The page of the gateway: its files, and the readings of the stack that it shows."""
