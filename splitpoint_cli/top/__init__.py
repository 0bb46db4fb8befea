"""`splitpoint top`: two readings of everything, the rates between them, and how they look."""
