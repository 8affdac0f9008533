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
