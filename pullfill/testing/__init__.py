"""vLLM's executor without a model, for tests and benchmarks. No product room imports it."""
