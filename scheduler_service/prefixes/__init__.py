"""Where cached prefixes are: which store holds how many leading tokens of a sequence."""
