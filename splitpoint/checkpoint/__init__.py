"""A model folder on disk: its name, files and tokenizer, and whether this version serves it."""
