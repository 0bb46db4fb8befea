"""/v1/chat/completions: messages, tools, the requests of a body, and its answers."""
