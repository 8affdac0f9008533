"""Everything on at once: logins and TLS at both servers, cluster key, API key; real engines."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import web
from tests.support.certificates import make_certificates
from tests.support.cluster import Cluster, Worker, pullfill, until
from tests.support.etcd import EtcdServer
from tests.support.nats import NatsServer
from tests.support.oracle import Oracle
from tests.support.prompts import ask, assert_right, random_prompt

pytestmark = pytest.mark.engine

PASSWORD, API_KEY, ADMIN_KEY = (secrets.token_hex(16) for _ in range(3))


class Locked(Cluster):
    """A cluster whose servers want logins and certificates. `stranger` has another cluster key."""

    def lock(self) -> None:
        tls = make_certificates(self.directory / "tls")
        self.nats = NatsServer(
            self.directory / "nats",
            extra=f'authorization {{ user: pullfill, password: "{PASSWORD}" }}\n'
            f'tls {{ cert_file: "{tls.cert}", key_file: "{tls.key}", ca_file: "{tls.ca}", '
            "verify: true }",
        )
        self.etcd = EtcdServer(self.directory / "etcd", tls)
        self.api_key = API_KEY
        told = {"password": PASSWORD, "api": API_KEY, "admin": ADMIN_KEY}
        told |= {name: secrets.token_hex(32) for name in ("key", "other_key")}
        for name, secret in told.items():
            path = self.directory / name
            path.touch(0o600)
            path.write_text(f"{secret}\n")
        login = 'user = "{}"\npassword_file = "password"\n'
        files = f'ca = "{tls.ca}"\ncert = "{tls.cert}"\nkey = "{tls.key}"\n'
        for name, key in (("security.toml", "key"), ("stranger.toml", "other_key")):
            (self.directory / name).write_text(
                f"[nats]\n{login.format('pullfill')}{files}[etcd]\n{login.format('root')}{files}"
                f'[cluster]\nkey_file = "{key}"\n'
                '[frontend]\napi_key_file = "api"\nadmin_key_file = "admin"\n'
            )
        self.env = {"PULLFILL_SECURITY": str(self.directory / "security.toml")}
        self.stranger_env = {"PULLFILL_SECURITY": str(self.directory / "stranger.toml")}

    def command(self, *words: str) -> str:
        """What `pullfill WORDS` prints."""
        return pullfill(self, *words, **self.env).stdout


@pytest.fixture(scope="module")
def locked(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    with Locked(tmp_path_factory.mktemp("locked"), model_path) as cluster:
        cluster.lock()
        cluster.start_servers()
        cluster.etcd.enable_auth(PASSWORD)
        cluster.set_router(policy="always_remote")
        for role in ("decode", "prefill", "frontend"):
            cluster.launch(role, env=cluster.env)
        cluster.wait_ready(*cluster.workers)
        yield cluster


@pytest.fixture(scope="module")
def stranger(locked: Locked) -> Iterator[Worker]:
    """A prefill worker with all logins and the wrong cluster key, when it has tried to connect."""
    worker = locked.launch("prefill", env=locked.stranger_env)
    until(lambda: "another cluster key" in worker.tail(), 60.0, "the stranger was refused")
    yield worker
    worker.kill()


@pytest.mark.essential
def test_a_remote_prefill_gives_the_right_tokens(locked: Locked, oracle: Oracle) -> None:
    prompt = random_prompt(700, seed=81)
    answer = ask(locked, prompt, 6)
    assert_right(oracle, [prompt], [answer])
    told = locked.explain(answer.request_id)
    assert (told["path"], told["fallback"]) == ("remote", None)


@pytest.mark.essential
def test_http_without_a_key_is_refused(locked: Locked) -> None:
    def status(method: str, path: str, key: str = "") -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{locked.frontend_url}{path}"
        return web.request(method, url, headers=headers, json={}).status_code

    for method, path in (
        ("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize"),
        ("GET", "/pullfill/status"), ("GET", "/pullfill/requests/x"), ("POST", "/sleep"),
    ):  # fmt: skip
        assert status(method, path) == 401, path
        assert status(method, path, "not-the-api-key-0123") == 401, path
    assert status("GET", "/v1/models", API_KEY) == 200
    assert status("GET", "/v1/models", ADMIN_KEY) == 200
    assert status("POST", "/v1/nothing", API_KEY) == 404
    for path in ("/live", "/ready", "/health", "/metrics"):
        assert status("GET", path) == 200, path


def test_the_command_line_has_the_logins_too(locked: Locked) -> None:
    assert '"role": "decode"' in locked.command("status", "--json")
    assert "ok" in locked.command("doctor")
    assert locked.command("config", "get", "router.policy").strip() == "always_remote"


@pytest.mark.essential
def test_a_worker_with_another_cluster_key_is_kept_out(
    locked: Locked, stranger: Worker, oracle: Oracle
) -> None:
    (decode,) = locked.of("decode")
    (known,) = locked.load_of(decode)["prefill_workers"]
    assert known == locked.of("prefill")[0].instance_id
    assert "[cluster] key_file" in stranger.tail()
    assert "refused a control connection" in decode.tail(200)
    assert locked.counter("pullfill_auth_refused_total", link="control") > 0
    # It pulls jobs, cannot claim them, and the others do.
    prompts = [random_prompt(300, seed=n) for n in range(82, 86)]
    answers = [ask(locked, prompt, 4) for prompt in prompts]
    assert_right(oracle, prompts, answers, 4)


@pytest.mark.essential
def test_no_secret_is_in_a_log_or_on_a_command_line(locked: Locked) -> None:
    hidden = [PASSWORD, API_KEY, ADMIN_KEY]
    hidden += [(locked.directory / name).read_text().strip() for name in ("key", "other_key")]
    for worker in locked.workers:
        shown = worker.log.read_text(errors="replace")
        if worker.alive:
            shown += Path(f"/proc/{worker.pid}/cmdline").read_text()
        assert [secret for secret in hidden if secret in shown] == []
    stored = locked.etcd.ctl("get", "--prefix", "/", "-w", "json")
    assert [secret for secret in hidden if secret in stored] == []
