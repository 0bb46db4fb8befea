"""What the services share. Imports no service and never needs a GPU."""
