"""The schedulers behind the gateway: its connections to them, calls, and generations that go on."""
