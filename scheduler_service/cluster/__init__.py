"""The workers that the scheduler knows: how it finds and connects to them."""
