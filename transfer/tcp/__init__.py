"""KV blocks over plain TCP: any two hosts, CPU memory, received straight into KV memory."""
