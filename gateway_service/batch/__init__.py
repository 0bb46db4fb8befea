"""Files of requests in OpenAI's batch format: kept, answered line by line, and run for clients."""
