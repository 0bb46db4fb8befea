"""Tool calls in the text of an answer: parsers, and schemas that force a call."""
