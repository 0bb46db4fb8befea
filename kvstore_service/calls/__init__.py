"""The parts of a call: checks of requests, messages, reservations, and seals."""
