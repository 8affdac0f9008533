"""Prefixes between decode workers, and what frontends are told of them.

fetches        the asking side: which prefix is read from another decode worker, and the read
holders        its connections to the others
read_leases    the giving side: pins cached blocks while another decode worker reads them
block_events   tells frontends which blocks are cached here
"""
