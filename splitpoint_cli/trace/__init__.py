"""`splitpoint trace`: what a worker's lanes did, as a trace file."""
