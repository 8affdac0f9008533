"""The file of `up --file`: what it gives, and what is said if it is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from pullfill.deploy import cli
from pullfill.errors import ConfigError
from pullfill.options import UpOptions
from pullfill.wire import KvMode
from tests.support.docs import COMMANDS

GOOD = """
# All kinds of values.
model: org/m
decode: 2
prefill: 3
frontends: 2
port: 9000
transports: [shm, tcp]
kv-mode: pull
pin: no
detach: false
max-inflight: 7
namespace: 010          # in YAML 1.1 this would be 8
vllm-args:
  max-model-len: 8192
  enforce-eager: true
  enable-prefix-caching: false
  lora-modules: [a=b, c=d]
  speculative-config: {method: ngram, num_speculative_tokens: 3}
decode-args: --max-num-seqs 8 --seed '7'
prefill-args: [-tp, 2]
set:
  router.policy: cost
  queue.max_jobs: 10
"""


Up = Callable[..., UpOptions]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


@pytest.fixture
def up(path: Path, ups: list[UpOptions]) -> Up:
    """Runs `up` on a file of this text. Gives what it was called with."""

    def run(text: str | bytes, *flags: str) -> UpOptions:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        result = CliRunner().invoke(cli.app, ["up", "-f", str(path), *flags])
        if result.exception is not None:
            raise result.exception
        return ups[-1]

    return run


def test_every_key_is_a_flag(up: Up) -> None:
    got = up(GOOD)
    assert (got.model, got.decode, got.prefill, got.frontends) == ("org/m", 2, 3, 2)
    assert (got.port, got.namespace) == (9000, "010")
    assert got.workers.transports == {"shm", "tcp"}
    assert got.workers.kv_mode is KvMode.PULL
    assert (got.pin, got.restart, got.frontend.max_inflight) == (False, True, 7)
    *plain, speculation = got.vllm_args
    assert plain == [
        "--max-model-len=8192", "--enforce-eager", "--no-enable-prefix-caching",
        "--lora-modules", "a=b", "c=d",
    ]  # fmt: skip
    name, _, value = speculation.partition("=")
    assert name == "--speculative-config"
    assert json.loads(value) == {"method": "ngram", "num_speculative_tokens": 3}
    assert got.role_args["decode"] == ["--max-num-seqs", "8", "--seed", "7"]
    assert got.role_args["prefill"] == ["-tp", "2"]
    assert got.settings == ["router.policy=cost", "queue.max_jobs=10"]


def test_the_example_of_the_documents_works(up: Up) -> None:
    (example,) = re.findall(r"```yaml\n(model: .*?)```", COMMANDS.read_text(), re.DOTALL)
    got = up(example)
    assert (got.decode, got.role_args["prefill"]) == (2, ["--tensor-parallel-size=2"])


@pytest.mark.essential
def test_flags_win_over_the_file(up: Up) -> None:
    got = up("decode: 2\nprefill: 2\nvllm-args: {seed: 1}", "--prefill", "5", "--seed=2")
    assert (got.decode, got.prefill) == (2, 5)
    assert got.vllm_args == ["--seed=1", "--seed=2"], "the last one counts"


@pytest.mark.parametrize(
    ("variable", "called"),
    [([], "up -f cluster.yaml"), (["MODEL=m"], "up --model m -f cluster.yaml")],
)
def test_make_up_leaves_the_model_to_the_file(variable: list[str], called: str) -> None:
    root, env = Path(__file__).parents[3], {"PATH": os.environ["PATH"]}
    make = ["make", "-n", "up", "ARGS=-f cluster.yaml", *variable]
    shown = subprocess.run(make, cwd=root, env=env, capture_output=True, text=True, check=True)
    *_, command = shown.stdout.splitlines()
    assert command.partition("/pullfill ")[2].split() == called.split()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: m/n\nport: [8000\ndecode: 2\n", r", line 3: not YAML: expected ',' or '\]'"),
        ("model: m/n\nport 8000\n", ", line 3: not YAML: could not find expected ':'"),
        ("- a\n", ": give `KEY: VALUE` lines"),
        ("vllm-args: {a: {2024-01-01: b}}\n", ": not YAML: keys must be str"),
        ("vllm-args:\n  a: {b: 2024-13-45}\n", ": not YAML: month must be in 1..12"),
        (b"model: \xc3\xa4\xff\n", ": not YAML: unacceptable character #x00ff"),
        (b"[" * 600, ": not YAML: maximum recursion depth exceeded"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(up: Up, path: Path, text: str | bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{path}{told}") as caught:
        up(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("decode:\n", "'--decode': '' is not a valid integer"),
        ("kv-mode: poll\n", "'--kv-mode': 'poll' is not one of"),
        ("vllm-args: {port: 9}\n", "--port in --vllm-args is an option of pullfill"),
        ("decode-args: {kv-transfer-config: x}\n", "--decode-args: --kv-transfer-config is"),
    ],
)
def test_values_are_judged_as_on_the_command_line(
    path: Path, ups: list[UpOptions], text: str, told: str
) -> None:
    path.write_text(text)
    result = CliRunner().invoke(cli.app, ["up", "-f", str(path)])
    assert told in result.output + str(result.exception)
    assert ups == []


def test_a_key_that_is_no_flag_of_up_is_one_of_vllm(up: Up) -> None:
    assert up("seed: 1\ndecod: 2\n", "--seed=3").vllm_args == ["--seed=1", "--decod=2", "--seed=3"]


def test_a_file_that_is_not_there(path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["up", "--file", str(path)])
    assert "cannot read" in str(result.exception)
    assert "--file" in str(result.exception)
