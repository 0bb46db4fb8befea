"""Where cached prefixes are: the schedulers' catalog of chunks."""
