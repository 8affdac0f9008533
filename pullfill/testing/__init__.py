"""Stand-ins for parts of a cluster, for tests and benchmarks. No product room imports them.

- `memory_queue.py`: the queue, in this process.
- `loopback.py`: a transport whose two ends are in this process, with faults on demand.
- `mock_executor.py`, `mock_model.py`: vLLM's executor without a model.
"""
