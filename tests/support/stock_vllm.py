"""What the process of a stock vLLM server runs (`cluster.stock_vllm`)."""

from __future__ import annotations

import multiprocessing


def main() -> None:
    """vLLM's own server, with one thing changed: its engine is forked, as vLLM does on GPUs."""
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine import utils

    # On CPUs vLLM spawns it, which imports for six seconds what the zygote has already imported.
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    entry.main()
