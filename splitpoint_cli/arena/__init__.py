"""`splitpoint arena`: list, check and remove arenas."""
