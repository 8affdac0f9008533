"""How processes speak over sockets: frames, the sealed channel, keys, addresses."""
