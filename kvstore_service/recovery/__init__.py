"""Recovery after a restart: reads the arena, and verifies recovered chunks."""
