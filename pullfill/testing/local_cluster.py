"""A cluster on this machine for the tests of other projects.

    from pullfill.testing import cluster

    with cluster(prefill=2) as c:
        client = openai.OpenAI(base_url=c.base_url, api_key="none")

It runs `pullfill up` in a state directory of its own, on free ports, and returns when requests can
be sent. At the end of `with` the cluster drains, and its directory is removed. If the caller is
killed, a process beside it (`guard`) ends the cluster.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from pullfill.config import ClusterFile, read_cluster_file
from pullfill.errors import UnavailableError

COMMAND = (sys.executable, "-P", "-m", "pullfill")
GUARD = (sys.executable, "-P", "-c", f"from {__name__} import guard; guard()")
# vLLM's flags for engines without a model: every token is the same, and computed in no time.
MOCK = ("--distributed-executor-backend", "pullfill.testing.mock_executor.MockExecutor")
_READY = "ready"


class LocalCluster:
    """A cluster that runs. Made by `cluster`.

    state_dir: its state directory, with the logs of all processes in `logs/`.
    model: the name under which it serves its model."""

    def __init__(self, state_dir: Path, model: str) -> None:
        self.state_dir = state_dir
        self.model = model

    @property
    def url(self) -> str:
        """Address of the frontends, e.g. `http://127.0.0.1:40123`."""
        return self._file().frontend_url

    @property
    def base_url(self) -> str:
        """`base_url` of an OpenAI client."""
        return f"{self.url}/v1"

    @property
    def servers(self) -> tuple[str, ...]:
        """Flags of `pullfill up` for another cluster over the same NATS and etcd."""
        file = self._file()
        return "--nats", file.nats_url, "--etcd", file.etcd_url

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, e.g. `decode-0`. A restarted process has a new one."""
        return {entry.name: entry.pid for entry in self._file().processes}

    @property
    def instance_ids(self) -> dict[str, str]:
        """Instance ids of the workers and frontends by name."""
        return {e.name: e.instance_id for e in self._file().processes if e.instance_id}

    def pullfill(self, *words: str, timeout_s: float = 120.0) -> str:
        """Run `pullfill WORDS` on this cluster and return what it prints.

        Raises UnavailableError with its message if it fails."""
        done = subprocess.run(
            [*COMMAND, *words],
            env={**os.environ, "PULLFILL_STATE_DIR": str(self.state_dir)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise UnavailableError(f"pullfill {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        """Return what `pullfill status --json` prints."""
        found: dict[str, Any] = json.loads(self.pullfill("status", "--json"))
        return found

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return what `pullfill explain REQUEST_ID --json` prints."""
        found: dict[str, Any] = json.loads(self.pullfill("explain", request_id, "--json"))
        return found

    def _file(self) -> ClusterFile:
        return read_cluster_file(self.state_dir)


@contextmanager
def cluster(
    *flags: str,
    model: str = "demo",
    served_model_name: str | None = None,
    decode: int = 1,
    prefill: int = 1,
    frontends: int = 1,
    mock: bool = False,
    env: Mapping[str, str] | None = None,
    start_s: float = 600.0,
) -> Iterator[LocalCluster]:
    """Start a cluster, and stop it at the end of `with`.

    Raises UnavailableError with the output of `pullfill up` if it does not start. If the body of
    `with` raises, the state directory is kept, and the exception gets a note that names it.

    flags: more flags of `pullfill up`, also vLLM's, e.g. `"--max-model-len=8192"`.
    model: `demo`, a checkpoint directory, or a name of a model hub.
    served_model_name: what clients call the model. By default vLLM's choice: `model`.
    decode, prefill, frontends: number of processes.
    mock: engines without a model. They start sooner and need no weights but a config.json and a
    tokenizer. Their answers mean nothing.
    env: more environment variables for all processes.
    start_s: longest start, in seconds."""
    directory = Path(tempfile.mkdtemp(prefix="pullfill-"))
    state = directory / "state"
    words = ["--model", model, "--port", "0", "--state-dir", str(state)]
    words += ["--decode", str(decode), "--prefill", str(prefill), "--frontends", str(frontends)]
    if served_model_name is not None:
        words += ["--served-model-name", served_model_name]
    words += [*(MOCK if mock else ()), *flags]
    output = directory / "up.log"
    with output.open("wb") as log:
        guard = subprocess.Popen(
            [*GUARD, *COMMAND, "up", *words],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_ready(guard, output, start_s)
        yield LocalCluster(state, served_model_name or model)
    except BaseException as exc:
        exc.add_note(f"logs of the cluster: {directory}")
        _stop(guard)
        raise
    _stop(guard)
    shutil.rmtree(directory, ignore_errors=True)


def _wait_ready(guard: subprocess.Popen[bytes], output: Path, start_s: float) -> None:
    """Wait for the line of `up` that tells that all is ready. Raises UnavailableError."""
    deadline = time.monotonic() + start_s
    while True:
        ended = guard.poll() is not None
        text = output.read_text(errors="replace")
        if any(line.startswith(_READY) for line in text.splitlines()):
            return
        if ended:
            raise UnavailableError(f"the cluster did not start:\n{text.strip()}")
        if time.monotonic() > deadline:
            raise UnavailableError(f"the cluster did not start in {start_s:.0f} s:\n{text.strip()}")
        time.sleep(0.1)


def _stop(guard: subprocess.Popen[bytes]) -> None:
    """Close the guard's input and wait for its end. It drains the cluster first."""
    assert guard.stdin is not None
    guard.stdin.close()
    try:
        guard.wait(60.0)  # longer than the guard waits for the cluster
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


# --------------------------------------------------------------------------- the guard


def guard() -> NoReturn:
    """Run the command that `sys.argv` names, until it ends or standard input is closed.

    Belongs in a session of its own, so that Ctrl-C reaches only the caller."""
    with subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL) as child:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda given, _: child.send_signal(given))
        ended = os.pidfd_open(child.pid)
        # The kernel closes standard input however the caller ends.
        while ended not in (ready := select.select([0, ended], [], [])[0]):
            if ready and not os.read(0, 4096):
                break
        # The first SIGTERM asks the command to drain. The second one means: at once.
        for patience_s in (30.0, 15.0):
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                sys.exit(child.wait(patience_s))
        child.kill()
        sys.exit(child.wait())
