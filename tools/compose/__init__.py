"""Tries docker-compose.yml on a real engine: `make compose-test` (docs/deployment.md)."""
