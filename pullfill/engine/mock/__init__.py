"""A backend without a model: vLLM's scheduler and our connectors as they are, invented tokens."""
