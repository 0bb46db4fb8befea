"""splitpoint chat: a conversation with a running stack, in the terminal or from a pipe."""
