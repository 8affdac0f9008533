"""etcd: leases, membership, descriptors and watched settings.

`client` talks to the server; `lease` and `watch` are the two long-lived conversations with it;
`membership` is how this process is known, `directory` how it knows the others, `settings` the
hot router settings. Everything here runs on one asyncio loop per process.
"""
