"""etcd: leases, membership, descriptors and watched settings.

`client` makes the calls. `lease` and `watch` keep a lease and a prefix over outages. `membership`
is how this process is known, `directory` how it knows the others, `settings` what people set. All
of it runs on one asyncio loop per process.
"""
