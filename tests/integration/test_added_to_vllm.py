"""Runs the commands of "Add pullfill to what you run" in docs/operations.md, as they are printed.

Three things differ: the model's directory, the port of vLLM's server, and that `vllm serve MODEL`
runs the module behind it, because vLLM's CPU build has no working `vllm`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from tests.support import web
from tests.support.command_line import run
from tests.support.docs import text_of
from tests.support.etcd import free_ports
from tests.support.waiting import until

MODEL = "/models/m"
VLLM = """#!/bin/sh
[ "$1" = serve ] || exit 2
shift
exec {python} -m vllm.entrypoints.openai.api_server --port {port} --model "$@"
"""


def printed() -> str:
    """The section's only block of commands."""
    section = text_of("docs/operations.md").split("\n## Add pullfill to what you run\n")[1]
    (block,) = re.findall(r"^```bash\n(.*?)^```", section.split("\n## ")[0], re.M | re.S)
    assert MODEL in block
    return block


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_printed_commands_bring_remote_prefills(
    state: Path, tmp_path: Path, model_path: Path
) -> None:
    (port,) = free_ports(1)
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(VLLM.format(python=sys.executable, port=port))
    vllm.chmod(0o755)
    path = os.pathsep.join((str(vllm.parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    log = tmp_path / "printed.log"
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-ec", printed().replace(MODEL, str(model_path))],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # `up --detach` leaves it
        )
    try:
        until(lambda: serves(port, shell, log), 200, "vLLM's server answers")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        (model,) = client.models.list()
        answer = client.completions.create(model=model.id, prompt="word " * 300, max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        told = run(state, "explain", answer.id)
        assert told.returncode == 0, told.stderr
        assert "prefilled by a prefill worker (reason: cost_probe)" in told.stdout
        rows = json.loads(run(state, "status", "--json").stdout)["workers"]
        assert sorted(row["role"] for row in rows) == ["decode", "prefill"]
        decode, prefill = sorted(rows, key=lambda row: str(row["role"]))
        assert decode["load"]["prefill_workers"] == [prefill["instance_id"]]
        os.killpg(shell.pid, signal.SIGTERM)
        until(lambda: not group_of(shell), 60, "vLLM's server has ended")
        assert "decode-" not in run(state, "status").stdout, "it has left"
    finally:
        if group_of(shell):
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait(20)
        down = run(state, "down")
    assert down.returncode == 0, down.stderr
    assert "nats         stopped" in down.stdout


def serves(port: int, shell: subprocess.Popen[bytes], log: Path) -> bool:
    assert shell.poll() is None, log.read_text(errors="replace")[-5000:]
    try:
        return web.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def group_of(shell: subprocess.Popen[bytes]) -> bool:
    """Whether a process of it lives: vLLM's server outlives the shell."""
    shell.poll()
    try:
        os.killpg(shell.pid, 0)
    except ProcessLookupError:
        return False
    return True
