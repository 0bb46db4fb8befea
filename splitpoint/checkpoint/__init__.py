"""A model folder on disk: resolving its name, checking its files, reading its tokenizer."""
