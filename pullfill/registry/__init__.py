"""etcd: leases, membership and watched settings.

`client` makes the calls. `watch` follows a prefix over outages. `membership` is how
this process is known, on a lease. `directory` is how it knows the others, `live_settings` what
people set. All of it runs on one asyncio loop per process.
"""
