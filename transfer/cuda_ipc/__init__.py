"""Same host, GPU memory: peers map the owner's KV memory by its CUDA IPC handle and copy."""
