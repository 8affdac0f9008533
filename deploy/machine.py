"""What `pullfill doctor` checks on this machine, whether or not a cluster runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

from pullfill import releases
from pullfill.deploy import accelerator, install, local_servers, plan
from pullfill.engine import check
from pullfill.errors import ConfigError, IncompatibleError
from pullfill.net.this_host import SHM_DIR_ENV, shm_dir

OK, WARN, FAIL = "ok", "warn", "fail"
_SHM_FREE_WANTED = 512 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found.

    level: OK, WARN (works, but not as well) or FAIL.
    advice: what to do about it. Empty: nothing."""

    level: str
    what: str
    advice: str = ""


def _installed(name: str) -> str:
    """Return the version of an installed distribution. Empty: it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def packages() -> Iterator[Finding]:
    """Check that vLLM and torch are releases that pullfill is tested with."""
    vllm = releases.VLLM
    try:
        found = check.require_version()
        vllm = check.base_version(found)
        yield Finding(OK, f"vLLM {found}")
    except IncompatibleError as exc:
        yield Finding(FAIL, *str(exc).split(": ", 1))
    torch, wanted = _installed("torch"), releases.TORCH[vllm]
    if check.base_version(torch) == wanted:
        yield Finding(OK, f"torch {torch}")
    else:
        what = f"torch {torch} is installed" if torch else "torch is not installed"
        advice = "remove .venv, then make install"
        yield Finding(FAIL, f"{what}, pullfill is tested with {wanted}", advice)


def _is_cpu_build(name: str) -> bool:
    return _installed(name).endswith("+cpu")


def torch_add_ons() -> Iterator[Finding]:
    """Check that torchvision and the like are of the same build as torch."""
    wrong = [name for name in install.TRAP if _installed(name) and not _is_cpu_build(name)]
    if wrong and _is_cpu_build("torch"):
        yield Finding(
            FAIL,
            f"{', '.join(wrong)} built for CUDA beside a CPU torch: importing transformers fails",
            f"{sys.executable} -m pip uninstall -y {' '.join(wrong)}",
        )


def refuse_wrong_packages() -> None:
    """Refuse to start workers whose imports would fail.

    Raises IncompatibleError or ConfigError, which say what to do."""
    # pip alone installs both kinds of wrong packages: `pip install pullfill` has no vLLM, and with
    # the extra `cpu` torchvision may be a build for CUDA.
    check.require_version()
    for finding in torch_add_ons():
        raise ConfigError(f"{finding.what}. {finding.advice}")


def server_binaries() -> Iterator[Finding]:
    """Check that nats-server and etcd are there."""
    for name, find in (
        ("nats-server", local_servers.nats_binary),
        ("etcd", local_servers.etcd_binary),
    ):
        try:
            yield Finding(OK, f"{name}: {find()}")
        except ConfigError as exc:
            yield Finding(FAIL, str(exc), "make install")


def compute() -> Iterator[Finding]:
    """Tell what workers compute on: GPUs, or CPU cores."""
    try:
        kind = accelerator.detect()
    except ValueError as exc:
        wrong = os.environ.get(accelerator.DEVICE_ENV)
        yield Finding(FAIL, str(exc), f"unset {accelerator.DEVICE_ENV}" if wrong else "")
        return
    gpus, cores = accelerator.gpu_count(), len(plan.usable_cores())
    if gpus and _is_cpu_build("torch"):
        yield Finding(
            WARN, f"{gpus} GPU(s), but torch is a CPU build", "remove .venv, then make install"
        )
    elif gpus:
        yield Finding(OK, f"{gpus} GPU(s), {kind}")
    elif cores < 2:
        yield Finding(
            WARN,
            "one CPU core: decode and prefill workers take it from each other",
            "with two or more cores a long prefill does not slow decoding",
        )
    else:
        yield Finding(OK, f"{cores} CPU cores, no GPU: each worker gets cores of its own")


def shared_memory() -> Iterator[Finding]:
    """Check that the directory of shared KV files has room."""
    shm = shm_dir()
    if not shm.is_dir():
        advice = f"mount a tmpfs there, or name another with {SHM_DIR_ENV}: workers share KV in it"
        yield Finding(FAIL, f"{shm} is missing", advice)
        return
    free = shutil.disk_usage(shm).free
    if free < _SHM_FREE_WANTED:
        yield Finding(
            WARN,
            f"{shm} has {free >> 20} MiB free",
            "workers keep their KV caches there: enlarge it (containers: --shm-size=4g)",
        )
    else:
        yield Finding(OK, f"{shm} has {free >> 20} MiB free")


def transports() -> Iterator[Finding]:
    """Tell over which transports KV can move on this machine."""
    # A process of its own finds out: it opens devices and imports what is installed.
    command = [sys.executable, "-m", "pullfill.transfer.connect"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        survey: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        yield Finding(WARN, f"transports cannot be listed: {exc}", f"try {' '.join(command)}")
        return
    works = [name for name, why in survey.items() if why is None]
    others = "; ".join(f"not {name}: {why}" for name, why in survey.items() if why is not None)
    if works:
        yield Finding(OK, f"KV can move over {', '.join(works)} on this machine", others)
    else:
        yield Finding(FAIL, "no transport works on this machine", others)
