"""OpenAI's bodies as requests of the scheduler, and answers as OpenAI's: pure, without HTTP."""
