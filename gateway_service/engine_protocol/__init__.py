"""vLLM's engine protocol, so that gateways that speak gRPC to engines can stand in front."""
