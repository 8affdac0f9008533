"""Lets vLLM's CPU engine start in a process that has imported numba. Import it with numba.

vLLM looks for its Triton kernels in every object of every module (`_rebind_kernels` in
vllm/triton_utils/dispatcher.py). It takes the `__dict__` of each object that has one. The object
`lib` of llvmlite, on which numba rests, answers to every name with a function of its library. So it
seems to have a `__dict__`, and the engine would not start.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi


def hide(library: type) -> None:
    """Have instances of a class like llvmlite's `_lib_wrapper` lack the names that Python gives."""
    find: Any = library.__getattr__  # type: ignore[attr-defined]

    def find_function(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = find_function  # type: ignore[attr-defined]


hide(type(ffi.lib))
