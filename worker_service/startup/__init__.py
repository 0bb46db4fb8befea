"""From the options of a command line to a worker that can serve."""
