"""Structured output: which tokens may follow, so that an answer stays within its grammar."""
