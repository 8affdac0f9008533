"""Runs each step of the Dockerfile but its base, where there is no Docker: `python -m tests.image`.

The base is a folder that debootstrap (Debian's package) fills with the same Debian and Python. Each
RUN is a shell in a chroot there, each COPY takes the files that git has. Then a cluster of the demo
model starts as the image's user, and a request goes through it. Needs root and some minutes.

    python -m tests.image [--folder DIR] [--bind PATH ...]

--bind: shows a folder of this machine inside, e.g. the wheels that pip is set up for.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE = "bookworm"
BASE = re.compile(rf"FROM python:3\.11-slim-{SUITE}$")
PACKAGES = "python3,python3-venv,ca-certificates"
TRY = """
set -e
pullfill up --detach --port 8123
trap 'pullfill down' EXIT
python -m json.tool <<END
$(python -c "
import json, urllib.request
body = json.dumps({'model': 'demo', 'prompt': 'word ' * 600, 'max_tokens': 4}).encode()
told = {'Content-Type': 'application/json'}
ask = urllib.request.Request('http://127.0.0.1:8123/v1/completions', body, told)
answer = json.load(urllib.request.urlopen(ask))
print(json.dumps({'id': answer['id'], 'usage': answer['usage']}))
")
END
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile and its argument."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M))
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, argument = line.partition(" ")
        yield name, argument.strip()


@dataclass(slots=True)
class Image:
    """A folder that becomes the image. It has what Dockerfiles of this repository use."""

    root: Path
    env: dict[str, str]
    where: str = "/"
    user: str = "0"
    arguments: dict[str, str] = field(default_factory=dict)
    entry: list[str] = field(default_factory=list)

    def do(self, name: str, argument: str) -> None:
        """Carry out one instruction. Raises CalledProcessError."""
        match name:
            case "FROM":
                assert BASE.match(f"FROM {argument}"), f"the base has changed: {argument}"
            case "ARG":
                key, _, value = argument.partition("=")
                self.arguments[key] = value
            case "ENV":
                for pair in shlex.split(argument):
                    key, _, value = pair.partition("=")
                    self.env[key] = re.sub(r"\$(\w+)", lambda m: self.env[m[1]], value)
            case "WORKDIR":
                self.where = argument
                self._path(argument).mkdir(parents=True, exist_ok=True)
            case "USER":
                self.user = argument
            case "COPY":
                assert argument == ". .", f"not known here: COPY {argument}"
                copy_repository(self._path(self.where))
            case "RUN":
                self.run(argument)
            case "ENTRYPOINT":
                self.entry = re.findall(r'"([^"]+)"', argument)
            case _:
                raise ValueError(f"not known here: {name}")

    def run(self, script: str) -> None:
        """Run a shell script inside, as the present user. Raises CalledProcessError."""
        home = "/root" if self.user == "0" else "/home/pullfill"
        inside = {**self.env, **self.arguments, "HOME": home}
        shell = ["/bin/sh", "-c", f"cd {shlex.quote(self.where)} && {script}"]
        as_user = ["chroot", f"--userspec={self.user}", str(self.root), *shell]
        subprocess.run(as_user, env=inside, check=True)

    def _path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")


def copy_repository(target: Path) -> None:
    """Copy what git has of the repository, also files that are not committed yet."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def mount(root: Path, folders: Sequence[str]) -> None:
    """Show /proc, /sys, /dev and these folders inside, until this process has ended."""
    for folder in ("/proc", "/sys", "/dev", *folders):
        target = root / folder.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--rbind", folder, target], check=True)


def make_base(root: Path) -> None:
    """Fill an empty folder with a Debian whose `python` is 3.11, and this machine's network."""
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
    subprocess.run(command, check=True)
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")


def settings() -> dict[str, str]:
    """How this machine reaches package indexes."""
    names = re.compile(r"(PIP_\w+|\w*_PROXY|\w*_proxy|SSL_CERT_FILE)$")
    return {k: v for k, v in os.environ.items() if names.match(k)}


def build(root: Path, folders: Sequence[str], env: Mapping[str, str]) -> None:
    """Do every step, then serve a request as the image does."""
    if not (root / "usr").exists():
        make_base(root)
    for file in ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf"):
        if Path(file).exists():
            shutil.copy(file, root / file.lstrip("/"))
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        shutil.copy(certificates, root / str(certificates).lstrip("/"))
    image = Image(root, {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/bin", **env})
    mount(root, folders)
    for name, argument in instructions((ROOT / "Dockerfile").read_text()):
        print(f"=== {name} {argument}", flush=True)
        image.do(name, argument)
    assert image.entry == ["pullfill"]
    print(f"=== a cluster as user {image.user}", flush=True)
    image.run(TRY)


def main() -> int:
    """Build in a folder, and remove it unless it was named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="build here, and keep it")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        build(given.folder, given.bind, settings())
        return 0
    root = (given.folder or Path(tempfile.mkdtemp(prefix="pullfill-image-"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    # What is mounted in a namespace of its own is gone with the process.
    command = ["unshare", "--mount", "--propagation=private", sys.executable, "-m", "tests.image"]
    binds = [word for path in given.bind for word in ("--bind", path)]
    done = subprocess.run([*command, "--inside", "--folder", str(root), *binds], cwd=ROOT)
    if given.folder is None:
        subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)
    if done.returncode == 0:
        print("every step but the base ran, and a cluster answered")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
