"""Whose fault it is that a request cannot be taken in: the request's own, or ours.

The request is at fault when vLLM's validation refuses a value of it. Then the user gets 400 and the
reason. Every other failure is a bug of the server. Then the user gets 500, and the log gets a
traceback. A bug must never look like bad input: nobody would report it.

No vLLM import here.
"""

from __future__ import annotations

import enum
from traceback import walk_tb

from pullfill.errors import BadMessage, ConfigError

# What vLLM's validation raises besides its own errors. vLLM answers 400 to these too.
_VALIDATION = (ValueError, TypeError, OverflowError)
_OWN = (BadMessage, ConfigError)
_CLIENT_ERROR = "VLLMClientError"


class Fault(enum.StrEnum):
    """Why a request ends with an error.

    WORKERS: no decode worker can serve it now. The answer is 503.
    REQUEST: it cannot be served as it is. The answer is 400.
    OURS: a bug of the server. The answer is 500.
    """

    WORKERS = "workers"
    REQUEST = "request"
    OURS = "ours"


def fault_of(exc: BaseException) -> Fault:
    """Return REQUEST for an error of vLLM's validation, or one that we raised as a refusal.

    Otherwise OURS. A ValueError of pullfill's own code is OURS, too."""
    if isinstance(exc, _OWN) or any(c.__name__ == _CLIENT_ERROR for c in type(exc).__mro__):
        return Fault.REQUEST
    if isinstance(exc, _VALIDATION) and _raised_by_vllm(exc):
        return Fault.REQUEST
    return Fault.OURS


def explained(exc: BaseException, where: str) -> str:
    """Return the message for the user of a request that failed by a bug.

    where: the process whose log has the traceback."""
    return (
        f"the server failed while it took this request in ({type(exc).__name__}: {exc}). This is a "
        f"bug in pullfill or vLLM, not a mistake in the request. The log of {where} has the "
        "traceback: please report it"
    )


def _raised_by_vllm(exc: BaseException) -> bool:
    """Whether vLLM, or a library that vLLM called, raised it. False for our code below vLLM's."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(exc.__traceback__)]
    rooms = [str(module).partition(".")[0] for module in modules]
    return "vllm" in rooms and "pullfill" not in rooms[rooms.index("vllm") :]
