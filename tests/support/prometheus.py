"""A real Prometheus and promtool, where this machine has them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.etcd import free_ports

SCRAPE_S = 1.0
DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "dashboard.json"


@cache
def dashboard() -> dict[str, Any]:
    """Return the dashboard for Grafana. Calls share it."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def missing() -> str:
    """Why the tests with Prometheus cannot run. Empty: they can."""
    if shutil.which("prometheus") and shutil.which("promtool"):
        return ""
    return "Prometheus is not installed (Debian: apt-get install prometheus)"


def promtool(*arguments: str, stdin: str = "") -> str:
    """What promtool prints. Raises AssertionError with it if promtool finds a fault."""
    done = subprocess.run(
        ["promtool", *arguments], input=stdin, capture_output=True, text=True, check=False
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return printed


class Prometheus:
    """Scrapes these addresses (`host:port`) and follows the rules. A context manager."""

    def __init__(self, directory: Path, targets: list[str], rules: Path) -> None:
        directory.mkdir(parents=True)
        (port,) = free_ports(1)
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S * 1000:.0f}ms", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "pullfill", "static_configs": [{"targets": targets}]}],
        }
        config["scrape_configs"][0]["scrape_timeout"] = f"{SCRAPE_S * 1000:.0f}ms"  # type: ignore[index]
        file = directory / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        self._command = [
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
        ]
        self._log = directory / "log"
        self._web = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False)

    def __enter__(self) -> Prometheus:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._web.close()
        self._process.kill()
        self._process.wait()

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its HTTP API. Raises httpx.HTTPStatusError while it starts."""
        reply = self._web.get(path, params=parameters)
        if reply.status_code == 503:
            reply.raise_for_status()
        answer = reply.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, text: str) -> list[dict[str, Any]]:
        """The samples that a query finds now."""
        return list(self.get("/query", query=text)["result"])

    def wait_for(self, text: str, within_s: float = 30.0) -> None:
        """Return as soon as a query finds something. It looks for targets after 5 s first."""
        until = time.monotonic() + within_s
        while True:
            try:
                if self.query(text):
                    return
            except (httpx.TransportError, httpx.HTTPStatusError):
                assert self._process.poll() is None, self._log.read_text()
            if time.monotonic() > until:
                targets = self.get("/targets")["activeTargets"]
                raise AssertionError(f"{text} finds nothing: {targets}")
            time.sleep(0.1)
