"""Shared code of services and clients. Imports no service and never needs a GPU."""

import os

# gRPC's core writes to stderr what it also reports as an error (a taken port, a failed
# handshake). It reads this as grpc is imported. A value that the user set stays.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
