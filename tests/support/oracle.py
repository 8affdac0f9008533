"""What one plain vLLM engine answers: the truth that the disaggregated cluster is compared with.

`Oracle` owns one child process (this file, run as a script) with one engine: no connector, no
prefix cache, float32, one thread. It is forked from the zygote, which has imported vLLM. Requests
and answers are JSON lines over a socket; what vLLM prints goes to a log file. The engine lives in a
child so that none of its settings leak into the tests. Greedy answers are remembered, so a prompt
asked twice costs nothing.
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
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from tests.support.zygote import Forked, zygote

Prompt = str | Sequence[int]

_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first question for logprobs compiles for half a minute
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class OracleError(RuntimeError):
    """The oracle's engine refused the request, or is gone. Says where its log is."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. logprobs: per generated token, {token id: logprob}, if they were asked for."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None = field(default=None)


class Oracle:
    """One plain engine over `model`. Start it with `start` or `with`. Thread-safe.

    forked: from the zygote. Otherwise it imports vLLM itself, as on a GPU.
    engine_args: more keyword arguments of `vllm.LLM`.
    """

    def __init__(
        self,
        model: Path,
        *,
        max_model_len: int = 4096,
        log: Path | None = None,
        forked: bool = True,
        **engine_args: Any,
    ) -> None:
        self._args = {"model": str(model), "max_model_len": max_model_len, **engine_args}
        if log is None:
            handle, name = tempfile.mkstemp(prefix="pullfill-oracle-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self.log = log
        self._forked = forked
        self._child: subprocess.Popen[bytes] | Forked | None = None
        self._socket: socket.socket | None = None
        self._ask: IO[str] | None = None
        self._hear: IO[str] | None = None
        self._lock = threading.Lock()
        self._known: dict[str, Completion] = {}

    def __enter__(self) -> Oracle:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the engine, once started."""
        assert self._child is not None, "start() first"
        return self._child.pid

    def start(self) -> Oracle:
        """Launch the engine and wait until it can answer (about five seconds)."""
        folder = tempfile.TemporaryDirectory(prefix="pullfill-oracle-")
        with folder as name, socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{name}/socket")
            door.listen()
            self._child = self._launch(json.dumps(self._args), f"{name}/socket")
            try:
                self._connect(door)
                self._answer()
            except OracleError:
                self.close()
                raise
        return self

    def _launch(self, *arguments: str) -> subprocess.Popen[bytes] | Forked:
        root = Path(__file__).resolve().parents[2]
        keep = "VLLM_CACHE_ROOT"
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_") or k == keep}
        env |= _ENV | {"PYTHONPATH": str(root)}
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

    def _connect(self, door: socket.socket) -> None:
        assert self._child is not None
        while not select.select([door], [], [], 0.1)[0]:
            if self._child.poll() is not None:
                raise OracleError(f"the oracle's engine did not start, see {self.log}")
        self._socket, _ = door.accept()
        self._ask, self._hear = self._socket.makefile("w"), self._socket.makefile("r")

    def close(self) -> None:
        """End the engine. Its log is removed when it ended well."""
        child, self._child = self._child, None
        if child is None:
            return
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_WR)  # end of input: the child leaves its loop
        try:
            code = child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            code = child.wait()
        for part in (self._ask, self._hear, self._socket):
            if part is not None:
                part.close()
        if code == 0:
            self.log.unlink(missing_ok=True)

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        logprobs: int | None = None,
        ends: Sequence[Sequence[int]] = (),
        **sampling: Any,
    ) -> list[Completion]:
        """One completion per prompt (text or token ids), in order; greedy unless told otherwise.

        ends: for each prompt of token ids, the numbers of tokens after which a step ends. The last
        is the whole prompt. A model of 16 bits rounds by them. Each prompt is then computed alone.
        Without it prompts not answered before run as one batch.
        sampling: more keyword arguments of vLLM's SamplingParams. Raises OracleError.
        """
        params = {
            "temperature": 0.0, "max_tokens": max_tokens, "logprobs": logprobs, **sampling
        }  # fmt: skip
        plain = [p if isinstance(p, str) else list(p) for p in prompts]
        stops = [list(e) for e in ends] or [list[int]()] * len(plain)
        asked = list(zip(plain, stops, strict=True))
        keys = [json.dumps([each, params], sort_keys=True) for each in asked]
        with self._lock:
            missing = {k: each for k, each in zip(keys, asked, strict=True) if k not in self._known}
            fresh: dict[str, Completion] = {}
            if missing:
                self._send({"prompts": list(missing.values()), "params": params})
                answers = self._answer()["answers"]
                fresh = dict(zip(missing, map(_completion, answers), strict=True))
            found = [fresh.get(key) or self._known[key] for key in keys]
            if params["temperature"] == 0:
                self._known |= fresh
        return found

    def counters(self, prefix: str) -> dict[str, int]:
        """vLLM's counters whose names begin with `prefix`. Start it with disable_log_stats=False.

        The answer to a prompt that was asked before is not counted again."""
        with self._lock:
            self._send({"counters": prefix})
            found: dict[str, int] = self._answer()["counters"]
        return found

    def _send(self, message: dict[str, Any]) -> None:
        if self._ask is None or self._child is None:
            raise OracleError("the oracle is not running: start() first")
        try:
            self._ask.write(json.dumps(message) + "\n")
            self._ask.flush()
        except ConnectionError:
            raise OracleError(f"the oracle's engine is gone, see {self.log}") from None

    def _answer(self) -> dict[str, Any]:
        assert self._hear is not None
        line = ""
        with suppress(ConnectionError):
            line = self._hear.readline()
        if not line:
            raise OracleError(f"the oracle's engine is gone, see {self.log}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise OracleError(f"{message['error']} (log: {self.log})")
        return message


def _completion(answer: dict[str, Any]) -> Completion:
    logprobs = answer["logprobs"]
    if logprobs is not None:
        logprobs = [{int(token): value for token, value in step} for step in logprobs]
    return Completion(answer["token_ids"], answer["text"], answer["finish_reason"], logprobs)


def _serve(args: dict[str, Any], requests: IO[str], answers: IO[str]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.reader import Counter

    engine = LLM(
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 16,
            "disable_log_stats": True,
            **args,
        }
    )

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    say({"ready": True})
    for line in requests:
        request = json.loads(line)
        if prefix := request.get("counters"):
            say({"counters": {
                m.name: m.value for m in engine.get_metrics() if m.name.startswith(prefix)
                and isinstance(m, Counter)
            }})  # fmt: skip
            continue
        try:
            prompts: Any = [
                p if isinstance(p, str) else {"prompt_token_ids": p} for p, _ in request["prompts"]
            ]
            params = SamplingParams(**request["params"])
            ends = [end for _, end in request["prompts"]]
            if all(ends):
                outs = [_in_steps(engine, p, params, e) for p, e in zip(prompts, ends, strict=True)]
            else:
                outs = engine.generate(prompts, params, use_tqdm=False)
        except Exception as exc:  # bad prompts and parameters; the engine itself goes on
            say({"error": f"{type(exc).__name__}: {exc}"})
            continue
        say({"answers": [_plain(out.outputs[0]) for out in outs]})


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


def _plain(output: Any) -> dict[str, Any]:
    steps = output.logprobs
    if steps is not None:
        steps = [[(token, entry.logprob) for token, entry in step.items()] for step in steps]
    return {
        "token_ids": list(output.token_ids),
        "text": output.text,
        "finish_reason": output.finish_reason,
        "logprobs": steps,
    }


def main() -> None:
    """The child. Arguments: of the engine, as JSON, and the address of a socket."""
    code = 1
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(sys.argv[2])
            with connection.makefile("r") as requests, connection.makefile("w") as answers:
                _serve(json.loads(sys.argv[1]), requests, answers)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:  # the end of an interpreter takes all modules apart, for 3 s
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
