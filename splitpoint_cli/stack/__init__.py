"""`splitpoint up` and `down`: one host's processes planned, started, supervised and stopped."""
