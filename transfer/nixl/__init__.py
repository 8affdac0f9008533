"""Optional: KV through NIXL (UCX: RDMA between hosts; else shared memory or TCP)."""
