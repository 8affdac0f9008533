"""Makes the pages of a KV cache before the first prompt needs them.

The kernel makes and clears a page of shared memory when somebody first touches it. vLLM's block
pool hands out every block once before it uses one again. Without this module a fresh worker pays
for new pages with each prompt, computed or received, until it has been through its whole cache.

So the whole cache is used from the start. If that is too much for the container (memory cgroup),
the kernel ends one of its processes now, as it would under load.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import time
from collections.abc import Mapping
from typing import Any

# Of madvise(2), Linux 5.14: make and map the pages, and keep what is in them.
_POPULATE_WRITE = 23
_STEP = 4 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def make_present(address: int, nbytes: int, *, parts: int = 1, within_s: float = 2.0) -> None:
    """Back memory of this process with pages.

    Blocks for `within_s` at most. An older kernel or a full tmpfs ends it earlier. The rest comes
    when it is touched.

    parts: number of equal pieces (layers) to fill side by side, each from its beginning, because
    low block numbers are used first.
    """
    give_up = time.monotonic() + within_s
    length = nbytes // parts
    for start in range(0, length, _STEP):
        count = min(_STEP, length - start)
        for part in range(parts):
            if time.monotonic() > give_up or not _populate(address + part * length + start, count):
                return


def make_caches_present(kv_caches: Mapping[str, Any]) -> None:
    """The same for the tensors of all layers, which vLLM keeps in one piece of CPU memory."""
    layers = list({id(tensor): tensor for tensor in kv_caches.values()}.values())
    if layers:
        storage = layers[0].untyped_storage()
        make_present(storage.data_ptr(), storage.nbytes(), parts=len(layers))


def _populate(address: int, nbytes: int) -> bool:
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + nbytes - first)
    while _libc.madvise(ctypes.c_void_p(first), size, _POPULATE_WRITE):
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True
