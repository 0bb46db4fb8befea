"""The workers that the scheduler knows: how it finds, connects to, and loses them."""
