"""Same host, CPU memory: the owner's KV memory is a file that peers map; locks are the fences."""
