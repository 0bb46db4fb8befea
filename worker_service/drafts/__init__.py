"""Guesses of the next tokens that a step verifies: which drafter guesses, and how many."""
