"""`splitpoint bench serve`: open-loop load on a running stack."""
