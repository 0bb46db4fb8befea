"""splitpoint eval: what selections of cached tokens cost in accuracy, on real text and tasks."""
