"""The oracle: one plain vLLM engine without any connector, in a process of its own.

Whatever pullfill answers must be what this engine answers. Runs as a child process so that its
environment and threads stay out of the test process; talks JSON lines over pipes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Completion:
    """logprobs[i]: log probability of token_ids[i]; empty when not asked for."""

    token_ids: list[int]
    text: str
    logprobs: list[float]


class Oracle:
    """Context manager. Answers are remembered, so asking again costs nothing."""

    def __init__(self, model: Path, *, kv_mib: int = 64, max_model_len: int = 4096) -> None:
        self._config = {"model": str(model), "kv_mib": kv_mib, "max_model_len": max_model_len}
        self._process: subprocess.Popen[str] | None = None
        self._known: dict[str, Completion] = {}

    def __enter__(self) -> Self:
        """Starts the engine at the first question, not here."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(30)
            process.stdout.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        max_tokens: int,
        *,
        logprobs: int | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Greedy continuations unless `sampling` says otherwise; end-of-text is ignored."""
        params = {"max_tokens": max_tokens, "logprobs": logprobs, "temperature": 0.0, **sampling}
        params.setdefault("ignore_eos", True)
        keys = [json.dumps([p if isinstance(p, str) else list(p), params]) for p in prompts]
        missing = [k for k in dict.fromkeys(keys) if k not in self._known]
        if missing:
            asked = [json.loads(k)[0] for k in missing]
            for key, answer in zip(missing, self._ask(asked, params), strict=True):
                self._known[key] = Completion(**answer)
        return [self._known[k] for k in keys]

    def _ask(self, prompts: list[Any], params: dict[str, Any]) -> list[dict[str, Any]]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.oracle", json.dumps(self._config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **_ENV},
                cwd=Path(__file__).parents[2],
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([prompts, params]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the oracle engine died"
        answers: list[dict[str, Any]] = json.loads(line)
        return answers


def _serve(config: dict[str, Any]) -> None:
    # Whatever libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=config["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=config["max_model_len"],
        kv_cache_memory_bytes=config["kv_mib"] << 20,
        max_num_seqs=16,
        block_size=32,
        disable_log_stats=True,
    )
    for line in sys.stdin:
        prompts, params = json.loads(line)
        asked = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
        outputs = engine.generate(asked, SamplingParams(**params), use_tqdm=False)
        results = []
        for output in outputs:
            choice = output.outputs[0]
            tokens = list(choice.token_ids)
            steps = choice.logprobs or []
            results.append({
                "token_ids": tokens,
                "text": choice.text,
                "logprobs": [s[t].logprob for s, t in zip(steps, tokens, strict=False)],
            })  # fmt: skip
        print(json.dumps(results), file=answers, flush=True)
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
