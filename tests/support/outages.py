"""Prompts that stayed local because NATS was silent for a moment.

A worker counts NATS as away after 0.6 s without an answer. On a busy machine that happens, and then
it is right that a prompt is not prefilled remotely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.cluster import Cluster, until
from tests.support.prompts import Answer

Asked = tuple[list[list[int]], list[Answer]]
_KEPT = {"no_prefill_worker", "queue_unavailable"}
_TRIES = 4


def by_outage(told: dict[str, Any]) -> bool:
    """Whether an outage kept the prompt local, or took it back. told: from `Cluster.explain`."""
    return bool(told["outage"]) and (told["reason"] in _KEPT or told["fallback"] == "prefill_lost")


def undisturbed(cluster: Cluster, asked: Callable[[int], Asked]) -> Asked:
    """Ask until no outage touches the prompts. Returns the last prompts and their answers.

    asked(turn): asks prompts, others in every turn, and returns them with their answers."""
    for turn in range(_TRIES):
        found = asked(turn)
        if not any(by_outage(cluster.explain(answer.request_id)) for answer in found[1]):
            break
        until(lambda: _over(cluster), 20, "the outage is over")
    return found


def _over(cluster: Cluster) -> bool:
    status = cluster.status()
    decode = [row["load"] for row in status["workers"] if row["role"] == "decode"]
    pulled = all(load.get("prefill_workers_pulling") for load in decode)
    return bool(status["servers"]["nats"]["up"]) and pulled
