"""A model in this process, without a server: `splitpoint.LLM`."""
