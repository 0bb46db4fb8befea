"""Guesses of the next tokens that a step verifies: who guesses, and how many."""
