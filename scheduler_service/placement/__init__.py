"""One request and the workers, without I/O: accounts, footprints, routing, and plans."""
