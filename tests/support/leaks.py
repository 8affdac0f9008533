"""What this process holds that connections could leave behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path


def usage() -> tuple[int, int, int]:
    """Descriptors, mappings of regions, threads."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("pullfill-")
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


def grown(before: tuple[int, int, int]) -> list[str]:
    """What there is more of than in `before`. Less is no leak: threads may end late."""
    kinds = ("descriptors", "mappings", "threads")
    now = zip(kinds, before, usage(), strict=True)
    return [f"{kind}: {was} before, {is_now} now" for kind, was, is_now in now if is_now > was]
