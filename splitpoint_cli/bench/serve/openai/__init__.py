"""A server of OpenAI's protocol under load: the backend, and HTTP as it needs it."""
