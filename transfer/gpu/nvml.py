"""What NVIDIA's management library (NVML) knows of links between GPUs.

It also knows GPUs that CUDA_VISIBLE_DEVICES hides. `pullfill up` hides from each worker the GPUs of
all others.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any
from uuid import UUID

_LIBRARY = "libnvidia-ml.so.1"
_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_OK = 0  # NVML_SUCCESS, and NVML_P2P_STATUS_OK


@cache
def _load() -> Any:
    """The library, ready for calls. None: there is none."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        return library if library.nvmlInit_v2() == _OK else None
    except (OSError, AttributeError):
        return None


def nvlink(uuid: str, other: str) -> bool:
    """Whether NVLink joins two GPUs. False, too, if NVML cannot say.

    uuid, other: in hexadecimal, as `CudaDriver.uuid` gives them."""
    if (library := _load()) is None:
        return False
    handles = []
    for each in (uuid, other):
        try:
            name = ctypes.c_char_p(f"GPU-{UUID(each)}".encode())
        except ValueError:
            return False
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != _OK:
            return False
        handles.append(handle)
    status = ctypes.c_int(-1)
    code = library.nvmlDeviceGetP2PStatus(*handles, ctypes.c_int(_NVLINK), ctypes.byref(status))
    return bool(code == _OK and status.value == _OK)
