"""The tensors of a checkpoint folder: their names, and their reading from safetensors files."""
