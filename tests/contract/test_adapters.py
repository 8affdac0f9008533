"""LoRA adapters of several frontends and decode workers, over a real etcd. No engine computes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill.engine.adapters import content, identity
from pullfill.errors import BadMessage, PeerUnavailable, RegistryUnavailable
from pullfill.registry import keys
from pullfill.registry.adapter_board import AdapterBoard
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete
from pullfill.wire import MAX_TEXT
from tests.support.late import Late
from tests.support.waiting import soon
from tests.unit.engine.test_adapters import Worker, an_adapter, asked, place

fastapi: Any = Late("fastapi")
front_adapters: Any = Late("pullfill.engine.front_adapters")
__all__ = ["place"]


class Fleet:
    """Decode workers, as `DecodePort` shows them.

    other: the last one has this directory at every path."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers
        self.other: Path | None = None

    async def call(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        assert method == "add_lora"
        fields = [msgspec.to_builtins(args[0]) for _ in self.workers]
        if self.other is not None:
            fields[-1][2] = str(self.other)
        try:
            loads = [w.adapters.adding(f) for w, f in zip(self.workers, fields, strict=True)]
            return [load(w.core) for w, load in zip(self.workers, loads, strict=True)]
        except BadMessage as exc:
            raise PeerUnavailable(f"decode worker: {exc}") from None


class Frontend:
    """One frontend. It sends each request to the first worker."""

    def __init__(self, fleet: Fleet, client: EtcdClient, namespace: str) -> None:
        self.fleet = fleet
        self.board = AdapterBoard(client, namespace)
        self.adapters = front_adapters.FrontAdapters(fleet, self.board, 9.0)

        async def unload(request: Any) -> str:
            del self.models.lora_requests[request.lora_name]
            return "Success"

        async def resolve(name: str) -> None:
            return None

        self.models = SimpleNamespace(
            lora_requests={}, unload_lora_adapter=unload, resolve_lora=resolve
        )

    async def start(self) -> None:
        self.adapters.follow(self.models)
        self.board.subscribe(self.adapters.on_change)
        await self.board.start()

    async def load(self, name: str, path: Path) -> None:
        """As vLLM does."""
        made = asked(name, path)
        await self.adapters.add(made)
        assert name not in self.served, "vLLM would warn"
        self.models.lora_requests[name] = made

    async def unload(self, name: str) -> None:
        await self.models.unload_lora_adapter(SimpleNamespace(lora_name=name))

    async def weights(self, name: str) -> bytes:
        """What a request with this adapter is computed with."""
        request = SimpleNamespace(lora_request=asked(name, Path("/any")), mm_features=None)
        await self.adapters.identify(request)
        sent, worker = request.lora_request, self.fleet.workers[0]
        return worker.core.step(
            worker.enter(sent.lora_name, Path(sent.lora_path), sent.lora_int_id)
        )

    @property
    def served(self) -> dict[str, str]:
        return {name: found.lora_path for name, found in self.models.lora_requests.items()}


class Cluster:
    """Two frontends and two decode workers."""

    def __init__(self, stack: AsyncExitStack, client: EtcdClient, ns: str) -> None:
        self.fleet, self._stack, self._new = Fleet(Worker(), Worker()), stack, (client, ns)

    async def frontend(self, *, late: bool = False) -> Frontend:
        """late: it has seen no worker yet."""
        made = Frontend(self.fleet, *self._new)
        self._stack.push_async_callback(made.board.close)
        await made.start()
        if not late:
            made.adapters.joined()
        return made


@pytest.fixture
async def cluster(client: EtcdClient, ns: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(stack, client, ns)


@pytest.mark.essential
async def test_what_one_loads_all_serve_until_one_unloads_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    one, two = await cluster.frontend(), await cluster.frontend()
    path = an_adapter(tmp_path / "a", b"A")
    await one.load("org/x", path)
    assert await two.models.resolve_lora("org/x"), "also before etcd has told it"
    assert await two.weights("org/x") == b"A"
    restarted = await cluster.frontend()
    for frontend in (one, two, restarted):
        await soon(lambda f=frontend: f.served == {"org/x": str(path)})
    assert await restarted.weights("org/x") == b"A"
    await two.unload("org/x")
    assert two.served == {}
    for frontend in (one, restarted):
        await soon(lambda f=frontend: f.served == {})
    with pytest.raises(BadMessage, match="org/x was unloaded"):
        await one.weights("org/x")


@pytest.mark.essential
async def test_workers_with_different_files_refuse_the_load_and_go_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    one, path = await cluster.frontend(), an_adapter(tmp_path / "a", b"A")
    await one.load("x", path)
    cluster.fleet.other = an_adapter(tmp_path / "b", b"B")
    with pytest.raises(PeerUnavailable, match=f"different files of LoRA adapter x at {path}: give"):
        await one.load("x", path)
    assert await one.weights("x") == b"A"


async def test_adapters_of_flags_are_read_when_there_is_a_worker(
    cluster: Cluster, tmp_path: Path
) -> None:
    path, fleet = an_adapter(tmp_path / "a", b"A"), cluster.fleet
    first = await cluster.frontend()
    await first.load("x", path)
    (path / "adapter_model.safetensors").write_bytes(b"B")  # then all are started again
    fleet.workers = Worker(), Worker()
    one, other = await cluster.frontend(late=True), await cluster.frontend()
    await one.load("x", path)
    one.adapters.joined()
    await soon(lambda: other.adapters._known["x"].content == content(str(path)))
    assert await one.weights("x") == await other.weights("x") == b"B"


async def test_features_are_computed_with_one_adapter(cluster: Cluster, tmp_path: Path) -> None:
    """vLLM keeps them by a name that begins with the adapter's."""
    one, path = await cluster.frontend(), an_adapter(tmp_path / "a", b"A")
    await one.load("x", path)
    features = [SimpleNamespace(identifier=name) for name in ("x:1", "xy:1", "2")]
    request = SimpleNamespace(lora_request=asked("x", path), mm_features=features)
    for _ in range(2):  # the choices of one answer share them
        request.lora_request = asked("x", path)
        await one.adapters.identify(request)
    known = identity("x", content(str(path)))
    assert [feature.identifier for feature in features] == [f"{known}:1", "xy:1", "2"]


async def test_what_fails_in_etcd_is_not_half_done(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, path = await cluster.frontend(), an_adapter(tmp_path / "a", b"A")

    async def away(*_: Any, **__: Any) -> Any:
        raise RegistryUnavailable("etcd does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(one.board._client, "put_if", away)
        with pytest.raises(RegistryUnavailable):
            await one.load("x", path)
    assert one.served == {}
    with pytest.raises(BadMessage, match=f"{MAX_TEXT} characters at most"):
        await one.load("x" * (MAX_TEXT + 1), path)
    await one.load("x", path)
    with monkeypatch.context() as patch:
        patch.setattr(one.board._client, "delete", away)
        with pytest.raises(fastapi.HTTPException, match="503: not unloaded: etcd does not answer"):
            await one.unload("x")
        assert await one.models.resolve_lora("\ud800") is None
    assert await one.weights("x") == b"A"
    assert "x" in one.served


async def test_numbers_grow_and_an_etcd_that_lost_its_data_gets_them_back(
    client: EtcdClient, ns: str, cluster: Cluster, tmp_path: Path
) -> None:
    one, path = await cluster.frontend(), an_adapter(tmp_path / "a")
    await one.load("x", path)
    await soon(lambda: "x" in one.board._known)
    first = one.board._known["x"][1]
    assert (first.name, first.path, first.content) == ("x", str(path), content(str(path)))
    ahead = msgspec.structs.replace(first, number=first.number + 90_000)  # of a clock 90 s ahead
    assert (await one.board.keep(ahead)).number == ahead.number + 1
    key = keys.record(ns, "adapters", "x")
    await client.delete(key)
    await soon(lambda: one.served == {})
    await one.load("x", path)
    again = one.adapters._known["x"]
    assert again.number > ahead.number + 1
    await soon(lambda: one.board._known["x"][1] == again)
    await one.board.close()
    await client.delete(key)
    one.board._on_change(Delete(key.encode(), 1))  # a store that is younger than the record
    assert "x" in one.served
    await client.put(keys.record(ns, "adapters", "odd"), b"nonsense")
    await soon(lambda: client.get(key))
    assert list(one.served) == ["x"]
