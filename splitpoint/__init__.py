"""What the services share. Imports no service and never needs a GPU."""

from splitpoint.transport.grpc_lines import silence

# Before anything imports grpc.
silence()
