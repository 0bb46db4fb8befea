"""The arena: the shared-memory file of chunks, its format and its rules of ownership."""
