"""What the /metrics of a stock vLLM server say of its load."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{([^}\n]*)\})? ([0-9.eE+-]+)$", re.M)
_ASKED = (
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:external_prefix_cache_queries_total",
)
"""Counts of requests, of tokens looked up in the server's own cache, and of tokens looked up at its
connector. vLLM counts the last two together. Without a connector, the last one stays 0."""
_UNSERVED = re.compile(r'finished_reason="(abort|error)"')
_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')
_BLOCK_SIZE = re.compile(r'[{,]block_size="(\d+)"')


@dataclass(slots=True)
class Load:
    """What a server's /metrics says. kv_blocks: all blocks. 0: unknown.

    bare: it has served requests, and has never asked a KV connector for one. False: not known."""

    running: float = 0.0
    waiting: float = 0.0
    kv_used: float = 0.0
    kv_blocks: int = 0
    block_size: int = 0
    bare: bool = False


def load_of(text: str) -> Load:
    """Read the text of vLLM's /metrics. Sums over engines. What is missing counts 0."""
    load = Load()
    asked: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name in _ASKED and not _UNSERVED.search(labels):
            asked[name] = asked.get(name, 0.0) + float(value)
        elif name == "vllm:num_requests_running":
            load.running += float(value)
        elif name == "vllm:num_requests_waiting":
            load.waiting += float(value)
        elif name == "vllm:kv_cache_usage_perc":
            load.kv_used = max(load.kv_used, float(value))
        elif name == "vllm:cache_config_info":
            blocks, size = _BLOCKS.search(labels), _BLOCK_SIZE.search("," + labels)
            load.kv_blocks += int(blocks[1]) if blocks else 0
            load.block_size = int(size[1]) if size else load.block_size
    served, cache, connector = (asked.get(name) for name in _ASKED)
    load.bare = bool(served and cache) and connector == 0.0
    return load
