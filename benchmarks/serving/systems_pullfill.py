"""pullfill as a user starts it: `pullfill up` with a checkpoint, then `pullfill config set`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.live import Live, running, wait_for
from benchmarks.serving import model
from benchmarks.serving.contract import Running
from tests.support import web

LINK_LIMIT_S = 60.0
FOLLOW_LIMIT_S = 30.0
DRAIN_S = 8.0
"""For streams still open when a run is given up; otherwise there are none."""
SHORT_REASON = {
    "conditional": {"short_prompt"},
    "always_local": {"policy_always_local"},
    "always_remote": {"policy_always_remote"},
    # The first one is that of prompts before anything was measured.
    "cost": {"short_prompt", "cost_local", "cost_remote"},
}
"""What the decode worker may say of a prompt of a few tokens, by policy."""


@contextmanager
def cluster(
    name: str,
    policy: str,
    decode: int,
    prefill: int,
    flags: Sequence[str],
    base: Path,
    *,
    workers: int = 0,
    **settings: float | str,
) -> Iterator[Running]:
    """A cluster with so many workers and that router policy. Raises BenchError.

    workers: how many workers with both sides are started.
    settings: further router settings, by name."""
    counts = [f"--workers={workers}", f"--decode={decode}", f"--prefill={prefill}"]
    state = base / "cluster"
    told = ["--model", str(model.model_directory()), *counts, *flags]
    with running(state, *told, drain_s=DRAIN_S) as live:
        wait_for(
            lambda: len(live.linked()) == prefill + workers,
            LINK_LIMIT_S,
            f"{name}: every prefill worker is connected to every decode worker",
        )
        set_policy(live, policy, **settings)
        yield Running(
            name=name,
            url=live.url,
            model=model.NAME,
            pids=live.pids(),
            ready_s=live.ready_s,
            set_policy=lambda wanted, **more: set_policy(live, wanted, **more),
        )


def set_policy(live: Live, policy: str, **settings: float | str) -> None:
    """Set `router.policy` and other settings of the router, and wait until the decode worker
    follows it, and the frontend `decode_policy`.

    Raises BenchError with the output of `pullfill config set`, or if they do not follow."""
    live.configure(**settings, policy=policy)
    chosen_by = settings.get("decode_policy")

    def follow() -> bool:
        told = explained_short_one(live.url)
        same = chosen_by in (None, told["decode_choice"]["policy"])
        return same and told["reason"] in SHORT_REASON[policy]

    wait_for(follow, FOLLOW_LIMIT_S, f"all follow router.policy = {policy}, {settings}")


def explained_short_one(url: str) -> dict[str, Any]:
    """Ask for one token after a prompt of four, and return what the frontend explains about it."""
    body = {"model": model.NAME, "prompt": [model.plain_tokens()[0]] * 4, "max_tokens": 1}
    answer = web.post(f"{url}/v1/completions", json=body, timeout=60.0)
    request_id = answer.raise_for_status().json()["id"]
    found: dict[str, Any] = (
        web.get(f"{url}/pullfill/requests/{request_id}", timeout=10.0).raise_for_status().json()
    )
    return found
