"""The endpoints: what each does with a request, and what all do around it."""
