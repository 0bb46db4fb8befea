"""Known text read under selections: what it loses, and what the selections amount to."""
