"""A cluster for other people's tests, and stand-ins for parts of one. No product room imports them.

- `local_cluster.py`: `cluster()`, which runs a whole cluster on this machine.
- `mock_executor.py`, `mock_model.py`: vLLM's executor without a model.
"""

from pullfill.testing.local_cluster import LocalCluster, cluster

__all__ = ["LocalCluster", "cluster"]
