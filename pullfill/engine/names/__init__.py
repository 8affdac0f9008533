"""Checks by name whether pullfill fits another release of vLLM, from Python files alone."""
