"""gRPC: channels, servers, error conversion, TLS and access tokens."""
