"""A burst of long prompts beside running streams. The decode worker is real but for its model."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pullfill import wire
from pullfill.engine import check, front_wire
from pullfill.engine.requests import TRACKED, prefill_request, prepare
from tests.integration.test_mock_engine import MOCK
from tests.support.cluster import MODEL, Cluster, until
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.engine

PROMPT = 128_000
STEP_S = 0.01
STREAMS = 2


class Peer:
    """The frontend's end of the wire. Notes the end of each engine step (the worker's clock)."""

    def __init__(self, address: str) -> None:
        self.codec = front_wire.FrontendCodec()
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        front_wire.set_options(self.socket)
        self.socket.connect(address)
        self.steps: list[float] = []
        self.answered = False
        self._pinged = 0.0
        hello = front_wire.FrontendHello(
            frontend_instance="f", vllm_version=check.require_version(), model=MODEL
        )
        self.socket.send_multipart([front_wire.HELO, wire.encode(hello)])
        assert self.socket.poll(5000)
        assert self.socket.recv_multipart()[0] == front_wire.HELO

    def request(self, name: str, prompt: list[int], count: int) -> list[bytes]:
        request = prefill_request(name, prompt, cache_salt=None, priority=0, arrival_time=0.0)
        request.sampling_params.max_tokens = count
        return [front_wire.ADD, *(bytes(part) for part in self.codec.encode(request))]

    def read(self, done: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < deadline, f"not within {within_s} s"
            if time.monotonic() - self._pinged > front_wire.PING_INTERVAL_S:
                self.socket.send_multipart([front_wire.PING])
                self._pinged = time.monotonic()
            if self.socket.poll(100):
                kind, *frames = self.socket.recv_multipart()
                if kind == front_wire.OUT:
                    self._note(self.codec.outputs(frames))

    def _note(self, outputs: Any) -> None:
        self.answered |= outputs.utility_output is not None
        if outputs.outputs:
            self.steps.append(outputs.timestamp)


@pytest.fixture
def peer(tmp_path: Path, model_path: Path) -> Iterator[Peer]:
    cluster = Cluster(tmp_path / "mock", model_path)
    try:
        cluster.start_servers()
        cluster.launch(
            "decode", *MOCK, f"--max-model-len={PROMPT + 8000}", f"--max-num-seqs={STREAMS}",
            "--additional-config", f'{{"mock": {{"step_s": {STEP_S}}}}}',
            env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
        )  # fmt: skip
        (record,) = until(lambda: cluster.records("decode"), 60, "the worker").values()
        peer = Peer(record.data)
        yield peer
        peer.socket.close(0)
    finally:
        cluster.stop()


@pytest.mark.parametrize("length", [0, 5, 16, 1023, 1024, 1040, 5000])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_prepared_request_has_the_block_hashes_of_vllm(length: int, salt: str | None) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    init_none_hash(sha256)

    class Core:
        mm_receiver_cache = None
        request_block_hasher = staticmethod(get_request_block_hasher(16, sha256))
        preprocess_add_request = EngineCore.preprocess_add_request

    core: Any = Core()
    sent = prefill_request(
        "r", random_prompt(length, seed=1), cache_salt=salt, priority=0, arrival_time=0.0
    )
    request, tokens = front_wire.WorkerCodec().request(front_wire.FrontendCodec().encode(sent))
    assert not request.prompt_token_ids
    made = _end_of(prepare(core, request, tokens))
    plain = Request.from_engine_core_request(sent, core.request_block_hasher)
    assert made.prompt_token_ids == plain.prompt_token_ids
    assert list(made.all_token_ids) == list(plain.all_token_ids)
    assert made.block_hashes == plain.block_hashes
    assert len(made.block_hashes) == length // 16
    lists = (made.prompt_token_ids, made._all_token_ids, made.block_hashes)
    long = length > TRACKED
    assert not (long and any(map(gc.is_tracked, lists))), "100 prompts cost 0.3 s a collection"
    for request in (made, plain):
        request.append_output_token_ids(list(range(20)))
    assert made.block_hashes == plain.block_hashes, "the answer's blocks are hashed as well"


@pytest.mark.long
@pytest.mark.parametrize(("rounds", "count"), [(6, 4), (3, 100)])
def test_running_streams_do_not_notice_a_burst_of_long_prompts(
    peer: Peer, rounds: int, count: int
) -> None:
    """Streams take all slots, so the prompts cost only their preparation.

    Calm rounds and bursts alternate. Other processes use the cores in some rounds only. But if
    prompts were prepared between two steps, each would make a gap of five steps, in every round.
    A gap as long as those of a calm round with as many steps is not the burst's.
    """
    prompt = random_prompt(PROMPT, seed=1)
    for i in range(STREAMS):
        peer.socket.send_multipart(peer.request(f"stream-{i}", [1, 2, 3], 8000))
    peer.read(lambda: len(peer.steps) >= 20, within_s=30)
    shares, longest, few = [], [], 60
    for number in range(rounds):
        names = [f"long-{number}-{i}" for i in range(count)]
        burst = [peer.request(name, [number, i, *prompt[2:]], 1) for i, name in enumerate(names)]
        del peer.steps[:-1]
        peer.read(lambda few=few: len(peer.steps) > few, within_s=60)  # type: ignore[misc]
        calm = _gaps(peer.steps)
        del peer.steps[:-1]
        for message in burst:
            peer.socket.send_multipart(message)
        # Answered after the last prompt was taken in: calls keep their place.
        peer.answered = False
        peer.socket.send_multipart(
            [front_wire.UTIL, *peer.codec.encode((number, "is_sleeping", ()))]
        )
        peer.read(lambda: peer.answered, within_s=30)
        busy = _gaps(peer.steps)
        peer.socket.send_multipart([front_wire.ABRT, front_wire.encode_ids(names)])
        shares.append(_share(busy, 0.95) / _share(calm, 0.95))
        longest.append(busy[-1] / max(statistics.median(calm), calm[-1] / 2))
        few = max(few, len(busy))
        print(f"gaps in ms before: {_told(calm)}; in the burst: {_told(busy)}")
    told = f"95 %: {_list(shares)} of calm; longest: {_list(longest)} of a step, or of half"
    told += " of the longest in calm"
    print(told)
    assert statistics.median(shares) <= 2, told
    assert min(longest) <= 2, told


def _end_of(steps: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _gaps(steps: list[float]) -> list[float]:
    return sorted(b - a for a, b in itertools.pairwise(steps))


def _share(gaps: list[float], share: float) -> float:
    return gaps[int(len(gaps) * share)]


def _told(gaps: list[float]) -> str:
    shares = {f"{s:.0%}": f"{1e3 * _share(gaps, s):.1f}" for s in (0.5, 0.95, 0.99)}
    return f"{shares}, longest {1e3 * gaps[-1]:.1f} of {len(gaps)}"


def _list(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)
