"""vLLM's own server, with one thing changed: its engine is forked, as vLLM does on GPUs.

On CPUs vLLM spawns it, which imports for six seconds what the zygote has already imported.
"""

from __future__ import annotations

import multiprocessing

from vllm.entrypoints.launchers.api_server import entry
from vllm.v1.engine import utils


def main() -> None:
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    entry.main()
