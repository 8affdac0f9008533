"""What one plain vLLM engine answers: the truth that the disaggregated cluster is compared with.

`Oracle` owns one child process (this file, run as a script) with one engine: no connector, no
prefix cache, float32, one thread. It is forked from the zygote, which has imported vLLM. What vLLM
prints goes to a log file. The engine lives in a child so that none of its settings leak into the
tests. Greedy answers are remembered, so a prompt asked twice costs nothing.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.zygote import ENVIRONMENT, Forked, zygote


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. logprobs: per generated token, {token id: logprob}, if they were asked for."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None = None


class Oracle:
    """One plain engine over `model`, which lives in a `with`. Thread-safe.

    forked: from the zygote. Otherwise it imports vLLM itself, as on a GPU.
    engine_args: more keyword arguments of `vllm.LLM`.
    """

    def __init__(self, model: Path, *, forked: bool = True, **engine_args: Any) -> None:
        self._args = {"model": str(model), **engine_args}
        handle, name = tempfile.mkstemp(prefix="pullfill-oracle-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        self._forked = forked
        self._child: subprocess.Popen[bytes] | Forked | None = None
        self._link: Any = None
        self._lock = threading.Lock()
        self._known: dict[str, Completion] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def __enter__(self) -> Oracle:
        """Launch the engine and wait until it can answer (about five seconds)."""
        folder = tempfile.TemporaryDirectory(prefix="pullfill-oracle-")
        with folder as name, socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{name}/socket")
            door.listen()
            self._child = self._launch(json.dumps(self._args), f"{name}/socket")
            try:
                while not select.select([door], [], [], 0.1)[0]:
                    if self._child.poll() is not None:
                        raise RuntimeError(f"the oracle's engine did not start, see {self.log}")
                self._link = Connection(door.accept()[0].detach())
                self._answer()
            except BaseException:
                self.close()
                raise
        return self

    def _launch(self, *arguments: str) -> subprocess.Popen[bytes] | Forked:
        root = Path(__file__).resolve().parents[2]
        keep = "VLLM_CACHE_ROOT"
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_") or k == keep}
        env |= ENVIRONMENT | {"PYTHONPATH": str(root)}
        if self._forked:
            return zygote().spawn(arguments, env, self.log, module=__name__)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=root,
                env=env,
            )

    def close(self) -> None:
        """End the engine. Its log is removed when it ended well."""
        child, self._child = self._child, None
        if child is None:
            return
        if self._link is not None:
            self._link.close()  # the child leaves its loop
        try:
            code = child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            code = child.wait()
        if code == 0:
            self.log.unlink(missing_ok=True)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        logprobs: int | None = None,
        ends: Sequence[Sequence[int]] = (),
        **sampling: Any,
    ) -> list[Completion]:
        """One completion per prompt, in order; greedy unless told otherwise.

        ends: for each prompt, the numbers of tokens after which a step ends. The last
        is the whole prompt. A model of 16 bits rounds by them. Each prompt is then computed alone.
        Without it prompts not answered before run as one batch.
        sampling: more keyword arguments of vLLM's SamplingParams. Raises RuntimeError.
        """
        params = {
            "temperature": 0.0, "max_tokens": max_tokens, "logprobs": logprobs, **sampling
        }  # fmt: skip
        stops = [list(e) for e in ends] or [list[int]()] * len(prompts)
        asked = list(zip(map(list, prompts), stops, strict=True))
        keys = [json.dumps([each, params], sort_keys=True) for each in asked]
        with self._lock:
            missing = {k: each for k, each in zip(keys, asked, strict=True) if k not in self._known}
            fresh: dict[str, Completion] = {}
            if missing:
                answers = self._answer((list(missing.values()), params))
                fresh = {k: Completion(*told) for k, told in zip(missing, answers, strict=True)}
            found = [fresh.get(key) or self._known[key] for key in keys]
            if params["temperature"] == 0:
                self._known |= fresh
        return found

    def counters(self, prefix: str) -> dict[str, int]:
        """vLLM's counters whose names begin with `prefix`. Start it with disable_log_stats=False.

        The answer to a prompt that was asked before is not counted again."""
        with self._lock:
            found: dict[str, int] = self._answer(prefix)
        return found

    def _answer(self, question: Any = None) -> Any:
        """Ask the child. None: it is about to say that it is ready. Raises RuntimeError with the
        name of its log if it refuses the question or is gone."""
        try:
            if question is not None:
                self._link.send(question)
            answer = self._link.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the oracle's engine is gone, see {self.log}") from None
        if isinstance(answer, str):
            raise RuntimeError(f"{answer} (log: {self.log})")
        return answer


def _serve(args: dict[str, Any], link: Any) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.reader import Counter

    engine = LLM(
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 4096,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 16,
            "disable_log_stats": True,
            **args,
        }
    )
    link.send(True)
    while True:
        try:
            question = link.recv()
        except EOFError:
            return
        if isinstance(question, str):
            counters = [m for m in engine.get_metrics() if isinstance(m, Counter)]
            link.send({m.name: m.value for m in counters if m.name.startswith(question)})
            continue
        try:
            asked, params = question[0], SamplingParams(**question[1])
            prompts: Any = [{"prompt_token_ids": prompt} for prompt, _ in asked]
            ends = [end for _, end in asked]
            if all(ends):
                outs = [_in_steps(engine, p, params, e) for p, e in zip(prompts, ends, strict=True)]
            else:
                outs = engine.generate(prompts, params, use_tqdm=False)
        except Exception as exc:  # bad prompts and parameters; the engine itself goes on
            link.send(f"{type(exc).__name__}: {exc}")
            continue
        link.send([_plain(out.outputs[0]) for out in outs])


def _in_steps(engine: Any, prompt: Any, params: Any, ends: list[int]) -> Any:
    """Compute a prompt in steps that end after so many tokens of it."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    schedule, usual = scheduler.schedule, scheduler.max_num_scheduled_tokens
    sizes, taken = [end - start for start, end in pairwise((0, *ends))], list[int]()

    def schedule_next(*args: Any) -> Any:
        scheduler.max_num_scheduled_tokens = sizes[len(taken)] if len(taken) < len(sizes) else usual
        output = schedule(*args)
        taken.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = schedule_next
    try:
        (result,) = engine.generate([prompt], params, use_tqdm=False)
    finally:
        scheduler.schedule, scheduler.max_num_scheduled_tokens = schedule, usual
    assert taken[: len(sizes)] == sizes, f"asked for steps of {sizes}, not {taken}"
    return result


def _plain(output: Any) -> tuple[Any, ...]:
    """The fields of a Completion, in plain types."""
    steps = output.logprobs
    if steps is not None:
        steps = [{token: entry.logprob for token, entry in step.items()} for step in steps]
    return list(output.token_ids), output.text, output.finish_reason, steps


def main() -> None:
    """The child. Arguments: of the engine, as JSON, and the address of a socket."""
    code = 1
    try:
        door = socket.socket(socket.AF_UNIX)
        door.connect(sys.argv[2])
        _serve(json.loads(sys.argv[1]), Connection(door.detach()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:  # the end of an interpreter takes all modules apart, for 3 s
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
