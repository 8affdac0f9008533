"""The only place that knows vLLM's internals (with the two connector modules)."""
