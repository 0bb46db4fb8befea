"""Other engines as peers of `bench decode`, each in a child process of its own interpreter."""
