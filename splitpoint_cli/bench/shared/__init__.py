"""Parts that all benchmarks share: options, progress, endings, the machine, transformers."""
