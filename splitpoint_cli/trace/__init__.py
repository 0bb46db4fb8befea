"""`splitpoint trace`: how busy a worker's lanes were, from a trace file."""
