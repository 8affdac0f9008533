"""Decides whether a request is sent to a better decode worker, when it comes. Engine thread.

A frontend says with a request (TRY) what it believed of this worker. Here that is compared with
what is true, before vLLM has the request. If it was far off, the request is not taken. The frontend
gets the truth (`Redirect`), and decides alone: another worker, or this one after all. It sends the
request so (ADD) that this cannot happen twice. So several frontends need no shared state: what one
of them does not know of the others' requests, the worker knows.

This costs one search in the prefix cache. The next load report uses its result. Other requests are
searched only before a redirect, and if the prefix is not cached, because one of them may bring it.

If the worker dies before it has answered, the frontend sends the request elsewhere, as always. If
the frontend dies after a redirect, the worker has nothing of the request.
"""

from __future__ import annotations

from typing import Any

from pullfill import wire
from pullfill.decode_worker.frontends import Request
from pullfill.engine import front_wire
from pullfill.engine.front_wire import Picture, Redirect, RedirectReason
from pullfill.engine.load import EngineLoad

GONE_TOKENS = 256
"""A prefix counts as gone if more than so many of the expected tokens are missing. vLLM evicts the
end of a prompt first, and to miss a few tokens is not worth another message."""
FULL_TOKENS = 1024
FULL_SHARE = 0.5
"""A queue counts as full if it exceeds what was expected by more than FULL_TOKENS, and by more than
FULL_SHARE of what was expected."""


def is_gone(picture: Picture, held_tokens: int) -> bool:
    """Whether the worker holds far less of the prompt than the frontend believed."""
    return picture.matched_tokens - held_tokens > GONE_TOKENS


def is_full(picture: Picture, queued_tokens: int) -> bool:
    """Whether the worker has far more to compute than the frontend believed."""
    believed = picture.queued_tokens
    return queued_tokens - believed > max(FULL_TOKENS, FULL_SHARE * believed)


class Redirects:
    """Compares what frontends believed with what is true. Returns messages to frontends, as frames.

    tiered: vLLM offloads KV. Then blocks that have left the prefix cache may still be held, so a
    prefix is never gone."""

    def __init__(self, load: EngineLoad, *, tiered: bool = False) -> None:
        self.load = load
        self._tiered = tiered

    def look(self, taken: Request, request: Any, draining: bool) -> tuple[bytes, bytes] | None:
        """Return the answer to a request that is not taken. None: it is, and must now be added.

        request: vLLM's Request, with its block hashes."""
        held, picture = self.load.hit(request), taken.picture
        if picture is not None:
            if is_gone(picture, held):
                held = max(held, self.load.coming(request, picture.matched_tokens))
            if reason := self._why_not(picture, held, draining):
                held = max(held, self.load.coming(request, request.num_tokens))
                return self.back(taken, reason, held, draining=draining)
        self.load.came(request, held)
        return None

    def back(
        self, taken: Request, reason: RedirectReason, held: int = 0, *, draining: bool = False
    ) -> tuple[bytes, bytes]:
        """Return the answer to a request that is not taken. held: as `Redirect.held_tokens`."""
        if taken.picture is None:
            return front_wire.BACK, front_wire.encode_ids([taken.id])
        load = self.load.read(draining)
        told = Redirect(request_id=taken.id, reason=reason, held_tokens=held, load=load)
        return front_wire.RDIR, wire.encode(told)

    def _why_not(self, picture: Picture, held: int, draining: bool) -> RedirectReason | None:
        if draining:
            return RedirectReason.DRAINING
        if is_gone(picture, held) and not self._tiered:
            return RedirectReason.PREFIX_GONE
        # `queued` counts tokens that were computed since the last report. `read` does not.
        if is_full(picture, self.load.queued) and is_full(
            picture, self.load.read(draining).uncached_tokens_queued
        ):
            return RedirectReason.QUEUE_FULL
        return None
