"""GPU memory: the CUDA driver as far as it is needed, copies of many runs, KV cache regions."""
