"""Reads a checkpoint folder: `config.json` and the tensors of its safetensors files."""
