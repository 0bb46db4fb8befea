"""Structured output: grammars of answers, and the check in a process with limits."""
