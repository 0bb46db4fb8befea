"""What the services share. Imports no service and never needs a GPU."""

from splitpoint.grpc_lines import silence

# Before anything imports grpc.
silence()
