"""Collects what the router decides on: the state of the queue, the prefill workers and the blocks.

Made once all parts of the process exist. Reads them on the engine thread, without I/O.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.cost import Queue
from pullfill.decode_worker.forecast import Links
from pullfill.decode_worker.ledger import UNDER_WAY, JobState, Ledger
from pullfill.decode_worker.meter import DecodeMeter
from pullfill.decode_worker.peers import Peer, Peers
from pullfill.decode_worker.rules import JOB_TOO_LARGE, PROMPT_TOO_LONG, Situation
from pullfill.decode_worker.self_check import Checks
from pullfill.queue.jetstream import JetStreamProducer
from pullfill.queue.nats_connection import RAISE_PAYLOAD
from pullfill.runtime import log, metrics
from pullfill.runtime.health import ServerHealth, servers_json
from pullfill.snapshot import NOT_CLAIMED
from pullfill.wire import u32

logger = log.get("decode_worker.outlook")

# Bytes of a job beside its tokens and blocks: ids, adapter and salt, which may be long.
_JOB_ROOM = 8 << 10
_QUARANTINE_SHARE = 0.25
# So many of the jobs that were opened first are looked at for one that waits.
_LOOK = 16


@dataclass(slots=True)
class Outlook:
    """See the module.

    draining: set while this worker refuses new requests.
    num_blocks: of the KV cache."""

    context: DecodeContext
    producer: JetStreamProducer
    peers: Peers
    links: Links
    meter: DecodeMeter
    checks: Checks | None
    etcd: ServerHealth
    draining: threading.Event
    num_blocks: int
    _seldom: log.Seldom = field(default_factory=lambda: log.Seldom(3600.0))

    def situation(self, request: Any, hit_tokens: int) -> Situation:
        """Return everything that a rule may look at. request: vLLM's Request."""
        context, ledger, blocks = self.context, self.context.ledger, self.context.blocks
        config = context.router_config()
        prompt_tokens: int = request.num_prompt_tokens
        tokens = max(0, prompt_tokens - blocks.local_tokens - hit_tokens)
        more = blocks.targets(prompt_tokens, hit_tokens)
        kv_bytes = sum(memory.nbytes for memory in context.worker.memories)
        self_check = self.checks.reason if self.checks else ""
        depth = self.producer.depth()
        # Our own jobs count once they are opened. They reach the queue later.
        ours = ledger.sums()
        pulling = self.peers.pulling
        # Those without streams take a job first.
        takers = [peer for peer in pulling if not peer.load.harm] or pulling
        adapter = request.lora_request
        if adapter is not None:
            takes = any(peer.hello.adapters for peer in pulling)
            adapter = context.worker.adapters.for_others(adapter) if takes else None
        forecast = self.links.forecast(
            tokens,
            more,
            more * kv_bytes / self.num_blocks,
            loads={peer.instance_id: peer.load for peer in takers},
            done_tokens=sum(peer.done_tokens() for peer in pulling),
            depth_tokens=depth.depth_tokens,
            # Not those of claimed jobs: the queue knows these, and `uncomputed` is judged by what
            # is written. In pull mode nothing is.
            own_tokens=ours.queued_tokens,
            own_unwritten=ours.unwritten,
        )
        own_jobs = ours.jobs[JobState.QUEUED]
        under_way = sum(ours.jobs[state] for state in UNDER_WAY)
        in_front = max(depth.depth_jobs, own_jobs + under_way)
        harm = min((peer.load.harm for peer in takers), default=0.0)
        queue = Queue(len(takers), in_front, forecast.ahead, forecast.rate, harm)
        return Situation(
            prompt_tokens=prompt_tokens,
            hit_tokens=hit_tokens,
            local_tokens=blocks.local_tokens,
            config=config,
            engine=blocks.never or ("" if context.worker.owner.transports else "no_transport"),
            fell_back=context.traces.fallback_of(request.request_id) is not None,
            adapter=adapter,
            takes_features=any(peer.hello.features for peer in pulling),
            prefill_workers=len(pulling),
            self_check=self_check,
            oversize=self._oversize(prompt_tokens, pulling),
            queue_available=self.producer.available,
            claims_stalled=ledger.claims.stalled,
            queue_jobs=max(depth.depth_jobs - depth.in_flight, own_jobs),
            quarantine_full=ledger.quarantined_blocks > int(self.num_blocks * _QUARANTINE_SHARE),
            remote_kv=(ours.targets + more) / self.num_blocks,
            draining=self.draining.is_set(),
            forecast=forecast,
            costs=self.meter.predict(request, hit_tokens, queue, config),
        )

    def wanted(self, late_s: float) -> bool:
        """Whether this worker, which has streams, is to pull from the queue.

        late_s: seconds after which an own job is late. Any thread."""
        # Those without streams compute the jobs at less cost. That holds for late jobs, too. Here
        # they would make the steps of streams longer, and then be streams that meet no target.
        if any(not peer.load.harm for peer in self.peers.pulling):
            return False
        ledger = self.context.ledger
        ours = ledger.sums()
        # New jobs of others are known a second later. So jobs are wanted unless own ones wait.
        if self.producer.depth().depth_jobs > ours.jobs.total() or not ours.jobs[JobState.QUEUED]:
            return True
        now, oldest = ledger.oldest(_LOOK)
        return any(e.state is JobState.QUEUED and now - e.opened_at > late_s for e in oldest)

    def _oversize(self, prompt_tokens: int, pulling: Sequence[Peer]) -> str:
        """Why no prefill worker can get a prompt of this length. Empty: one can."""
        local_tokens = self.context.blocks.local_tokens
        tokens = prompt_tokens - local_tokens
        lengths = [peer.hello.max_prompt_tokens or math.inf for peer in pulling]
        longest = max(lengths, default=math.inf)
        size = u32.SIZE * (tokens + self.context.blocks.targets(prompt_tokens, 0)) + _JOB_ROOM
        if tokens > longest:
            reason, most = PROMPT_TOO_LONG, longest + local_tokens
            why = (
                f"no connected prefill worker takes more than {most:.0f}: raise its --max-model-len"
            )
        elif 0 < (most := self.producer.connection.max_body) < size:
            reason = JOB_TOO_LARGE
            why = f"its job has {size} bytes, and NATS takes {most}: {RAISE_PAYLOAD}"
        else:
            return ""
        if (more := self._seldom.due(reason)) is not None:
            told = "a prompt of %d tokens stays here, like all that are as long: %s%s"
            logger.warning(told, prompt_tokens, why, more)
        return reason

    def reasons(self) -> list[str]:
        """Why this worker is degraded, for /ready."""
        reasons = outages(self.producer.health, self.etcd, self.peers, self.context.ledger)
        if not self.peers.pulling:
            checked = self.checks.reason if self.checks else ""
            why = checked or "no prefill worker pulls jobs"
            reasons.append(f"{why}: every prompt is prefilled here")
        return reasons

    def servers(self) -> dict[str, Any]:
        """`servers` and `queue` of /status. The queue is null while NATS does not answer."""
        queue = msgspec.to_builtins(self.producer.depth()) if self.producer.available else None
        return {"servers": servers_json(self.producer.health, self.etcd), "queue": queue}

    def refresh_metrics(self) -> None:
        """Set the gauges. Those of the queue are NaN while NATS does not answer."""
        metrics.QUARANTINED_BLOCKS.set(self.context.ledger.quarantined_blocks)
        depth = self.producer.depth()
        known = self.producer.available
        metrics.QUEUE_DEPTH_JOBS.set(depth.depth_jobs if known else math.nan)
        metrics.QUEUE_DEPTH_TOKENS.set(depth.depth_tokens if known else math.nan)
        metrics.QUEUE_OLDEST_AGE.set(depth.oldest_age_s if known else math.nan)


def outages(nats: ServerHealth, etcd: ServerHealth, peers: Peers, ledger: Ledger) -> list[str]:
    """Why prompts cannot be prefilled remotely now, for people. Empty: no reason is known."""
    claims = "" if ledger.claims.closed else NOT_CLAIMED
    # Prefill workers learn from etcd that a decode worker is new, and where it is.
    return [why for why in (nats.outage(), *peers.not_pulling, claims, etcd.outage()) if why]
