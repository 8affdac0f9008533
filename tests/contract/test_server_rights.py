"""Logins, TLS and rights at real servers that want them."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pullfill.config import ClusterRef
from pullfill.deploy import doctor, local_servers
from pullfill.errors import ConfigError, NotNow
from pullfill.net.security import Security, load
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.streams import Names
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Put, watch_prefix
from pullfill.wire import QueueSettings
from tests.support.certificates import Certificates, make_certificates
from tests.support.etcd import EtcdServer
from tests.support.nats import NatsServer, dead_letters
from tests.support.queue_ends import connected
from tests.support.waiting import soon

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct-horse-battery-staple"
QUEUE = Names("demo", "0123456789abcdef")
SETTINGS = QueueSettings(publish_timeout_s=1.0, max_deliver=1, ack_wait_s=1.0)
HANG_S = 20.0


def write(directory: Path, toml: str, **secrets: str) -> Security:
    """The loaded security file of one test; `secrets` become files beside it."""
    for name, text in secrets.items():
        path = directory / name
        path.touch(0o600)
        path.write_text(text + "\n")
    (directory / "security.toml").write_text(toml)
    return load(directory / "security.toml")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


LOGIN = f'authorization {{ user: root, password: "{PASSWORD}" }}\n'


@pytest.fixture(scope="module")
def locked_nats(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[NatsServer]:
    """Wants a client certificate and a login."""
    tls = (
        f'tls {{ cert_file: "{certificates.cert}", key_file: "{certificates.key}", '
        f'ca_file: "{certificates.ca}", verify: true }}\n'
    )
    with NatsServer(tmp_path_factory.mktemp("nats"), extra=LOGIN + tls) as server:
        yield server


@pytest.fixture(scope="module")
def locked_etcd(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[EtcdServer]:
    """Wants a client certificate and a login."""
    with EtcdServer(tmp_path_factory.mktemp("etcd"), certificates) as server:
        server.enable_auth(PASSWORD)
        yield server


def toml(section: str, tls: Certificates, wrong: str = "") -> str:
    if wrong == "none":
        return ""
    login = "" if wrong == "login" else 'user = "root"\npassword_file = "password"\n'
    ca = tls.other_ca if wrong == "ca" else tls.ca
    return f'[{section}]\n{login}ca = "{ca}"\ncert = "{tls.cert}"\nkey = "{tls.key}"\n'


@pytest.mark.parametrize(
    ("section", "wrong", "advice"),
    [
        ("nats", "password", "refuses the login"),
        ("nats", "ca", "no TLS with NATS"),
        ("nats", "none", "no TLS with NATS"),
        ("etcd", "password", "check user and password_file of "),
        ("etcd", "login", "check user and password_file of "),
        ("etcd", "ca", "check ca, cert and key of "),
    ],
)
async def test_what_waiting_cannot_mend_ends_at_once_and_says_which_key_to_check(
    tmp_path: Path, locked_nats: NatsServer, locked_etcd: EtcdServer, certificates: Certificates,
    section: str, wrong: str, advice: str,
) -> None:  # fmt: skip
    password = "not the one" if wrong == "password" else PASSWORD
    security = write(tmp_path, toml(section, certificates, wrong), password=password)
    connecting: Any
    if section == "etcd":
        connecting = EtcdClient.connect(locked_etcd.url, wait_s=100.0, security=security.etcd)
    else:
        options = security.nats.options()
        connecting = connected(
            JetStreamProducer, locked_nats.url, QUEUE, wait_s=100.0, connect_options=options
        )
    async with asyncio.timeout(HANG_S):  # not the 100 s that it would wait for a dead server
        with pytest.raises(NotNow, match=advice) as caught:
            await connecting
    assert caught.value.retryable, "while certificates and passwords are renewed, it passes"
    assert f"[{section}]" in str(caught.value)
    assert password not in str(caught.value)


def test_a_creds_file_signs_the_servers_nonce(tmp_path: Path) -> None:
    """The server knows the public key only. So the signature is what lets us in."""
    key = Ed25519PrivateKey.generate()
    seed = base64.b32encode(b"SU" + key.private_bytes_raw() + b"\0\0").decode().rstrip("=")
    creds = (
        "-----BEGIN NATS USER JWT-----\nnot.a.jwt\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------"
    )
    security = write(tmp_path, '[nats]\ncredentials = "user.creds"\n', **{"user.creds": creds})
    options = security.nats.options()
    assert bytes(options["user_jwt_cb"]()) == b"not.a.jwt"
    key.public_key().verify(base64.b64decode(options["signature_cb"]("nonce")), b"nonce")


@asynccontextmanager
async def followed(client: EtcdClient, prefix: str, **limits: Any) -> AsyncIterator[list[bytes]]:
    """The values that a watch has brought so far. The client is closed at the end."""
    seen: list[bytes] = []

    async def follow() -> None:
        async for event in watch_prefix(client, prefix, **limits):
            if isinstance(event, Put):
                seen.append(event.value)

    following = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await client.close()


async def test_a_watch_outlives_a_changed_password(
    tmp_path: Path,
    locked_etcd: EtcdServer,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It ends all tokens, as their time does."""
    caplog.set_level(logging.DEBUG)
    security = write(tmp_path, toml("etcd", certificates), password=PASSWORD)
    told = await asyncio.to_thread(local_servers.etcd_ready, locked_etcd.url, HANG_S, security.etcd)
    assert told is None
    client = await EtcdClient.connect(locked_etcd.url, wait_s=HANG_S, security=security.etcd)

    async def change(password: str) -> None:
        user = {"name": "root", "password": password}
        await client.call("/auth/user/changepw", user)

    async with followed(client, "p/", idle_s=0.3, refused_s=0.2) as seen:
        await client.put("p/0", b"0")
        await soon(lambda: seen == [b"0"], HANG_S)
        await change("another")
        await soon(lambda: not client.health.up, HANG_S)
        assert "password_file" in client.health.outage()
        (tmp_path / "password").write_text("another")
        await soon(lambda: client.health.up, HANG_S)
        await client.put("p/1", b"1")
        await soon(lambda: seen == [b"0", b"1"], HANG_S)
        await change(PASSWORD)
        await soon(lambda: not client.health.up, HANG_S)
    assert not client.health.error("watch of p/"), "nobody watches any more"
    assert PASSWORD not in caplog.text


# --------------------------------------------------------------------------
# The least rights of docs/operations.md are enough, and reach no other namespace: real servers.


def block_of(marker: str) -> str:
    """The code block of docs/operations.md that holds `marker`."""
    text = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.S | re.M)
    (found,) = [block for block in blocks if marker in block]
    return str(found)


# ------------------------------------------------------------------ NATS


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    """With the `authorization` of the document; its passwords are ours."""
    text = block_of("publish: [").replace("…", PASSWORD)
    with NatsServer(tmp_path / "nats", extra=text) as server:
        yield server


async def test_jobs_dead_letters_and_surveys_with_the_rights_of_one_namespace(
    nats: NatsServer,
) -> None:
    options = {"user": "demo", "password": PASSWORD}
    producer, consumer = [
        await connected(
            kind, nats.url, QUEUE, settings=SETTINGS, wait_s=HANG_S, connect_options=options
        )
        for kind in (JetStreamProducer, JetStreamConsumer)
    ]
    try:
        await producer.publish("acked", b"body", 7)
        delivery = await consumer.pull(HANG_S)
        await delivery.in_progress()
        await delivery.ack()
        receipt = await producer.publish("cancelled", b"body", 7)
        assert await producer.cancel(receipt)
        await producer.publish("poison", b"body", 7)
        delivery = await consumer.pull(HANG_S)
        await delivery.term("poison")
        await producer.publish("used up", b"body", 7)
        await consumer.pull(HANG_S)  # and never settled: an advisory moves it

        async def dead() -> set[str]:
            return {letter.job_id for letter in await dead_letters(producer.connection, QUEUE)}

        await soon(dead, good={"poison", "used up"}.__eq__)
        login = nats.url.replace("://", f"://demo:{PASSWORD}@")
        assert [*(await doctor.ask_nats(ClusterRef("demo", "", login))).values()] == [2]
    finally:
        await asyncio.gather(producer.close(), consumer.close())
    assert "Violation" not in nats.log.read_text()


# ------------------------------------------------------------------ etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Set up by the commands of the document, with root's and the workers' password in place."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        for line in block_of("role grant-permission").strip().splitlines():
            words = line.replace("…", PASSWORD).split()
            assert words[0] == "etcdctl"
            server.ctl(*words[1:])
        yield server


@pytest.mark.essential
async def test_a_worker_lives_on_the_rights_of_its_namespace(etcd: EtcdServer) -> None:
    url = etcd.url.replace("://", f"://demo:{PASSWORD}@")
    client = await EtcdClient.connect(url, wait_s=HANG_S)
    async with followed(client, "/pullfill/demo/", idle_s=0.5) as seen:
        await client.ping(2.0)
        lease = (await client.grant_lease(5)).id
        worker = keys.worker("demo", "decode", "decode-1")
        await client.put(worker, b"one", lease)
        assert await client.put_if(keys.record("demo", "config", "router"), b"two", mod_revision=0)
        assert (await client.keep_alive(lease)).ttl > 0
        await soon(lambda: seen == [b"one", b"two"], HANG_S)
        await client.revoke_lease(lease)
        assert await client.get(worker) is None
        await client.delete(keys.record("demo", "config", "router"))
        for refused in (
            client.put(keys.record("other", "config", "router"), b"mine"),
            client.get_prefix("/pullfill/other/"),
            client.get_prefix("/pullfill/"),
        ):
            with pytest.raises(ConfigError, match="permission"):
                await refused
