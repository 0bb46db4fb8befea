"""Splitpoint's KV store under vLLM: a KV connector (docs/vllm.md)."""
