"""LoRA adapters are what their files say, and each worker numbers them itself."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill.engine.adapters import AdapterFiles, Adapters, content, identity, lora_request
from pullfill.errors import BadMessage
from pullfill.prefill_worker.engine import PrefillEngine
from pullfill.prefill_worker.reach import OutOfReach
from pullfill.wire import MAX_TEXT, Adapter
from tests.support.late import Late

lora: Any = Late("vllm.lora.request")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where copies of files are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Core:
    """Loads adapters as vLLM does, all but those named `broken`.

    held: what vLLM computes with, the weights by number. At most `most`.
    loads: the adapters that were loaded by `add_lora`.
    broken: whether a rank has raised. Then vLLM mixes up the answers of the ranks."""

    def __init__(self, most: int = 8) -> None:
        self.broken = False
        config = SimpleNamespace(max_cpu_loras=most)
        self.vllm_config = SimpleNamespace(lora_config=config)
        self.loads: list[Any] = []
        self.held: dict[int, bytes] = {}
        self.scheduler = SimpleNamespace(requests={})

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[Any]:
        try:
            return [method(self, *args)]
        except Exception:
            self.broken = True
            raise

    def add_lora(self, asked: Any) -> None:
        if asked.lora_name.startswith("broken"):
            raise ValueError(f"rank 64 of {asked.lora_name} at {asked.lora_path} is too high")
        self.step(asked)
        if asked.lora_name.startswith("misshapen"):  # known only when vLLM copies it to its place
            raise RuntimeError("The size of tensor a (64) must match that of tensor b (32)")
        self.loads.append(asked)

    def step(self, asked: Any) -> bytes:
        """Compute with an adapter, which is loaded if the engine lacks it. Returns its weights."""
        number = asked.lora_int_id
        if number not in self.held:
            weights = (Path(asked.lora_path) / "adapter_model.safetensors").read_bytes()
            while len(self.held) >= self.vllm_config.lora_config.max_cpu_loras:
                del self.held[next(iter(self.held))]
            self.held[number] = weights
        return self.held[number]

    def remove_lora(self, number: int) -> bool:
        return self.held.pop(number, None) is not None


def asked(name: str, path: Path, number: int = 1, **more: Any) -> Any:
    return lora.LoRARequest(name, number, str(path), **more)


def an_adapter(directory: Path, weights: bytes = b"w") -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def test_content_is_that_of_the_files_wherever_they_are(tmp_path: Path) -> None:
    one, same = an_adapter(tmp_path / "one"), an_adapter(tmp_path / "same")
    assert content(str(one)) == content(str(same))
    (same / "adapter_model.safetensors").write_bytes(b"x")
    assert content(str(one)) != content(str(same))
    (one / "adapter_model.safetensors").rename(one / "adapter_model.bin")
    assert content(str(one)) != content(str(an_adapter(tmp_path / "third")))
    before = content(str(same))
    (same / "checkpoint-1").mkdir()
    (same / "checkpoint-1" / "adapter_config.json").write_text("{}")
    (same / "README.md").write_text("of this machine")
    assert content(str(same)) == before, "vLLM reads no other files"
    (tmp_path / "empty").mkdir()
    for nothing in ("empty", "none"):
        with pytest.raises(OSError, match="no adapter at"):
            content(str(tmp_path / nothing))


class Worker:
    """What a decode worker does with the requests of frontends."""

    def __init__(self, most: int = 8) -> None:
        self.core, self.adapters = Core(most=most), Adapters()

    def add(self, name: str, path: Path, number: int = 1, **more: Any) -> str:
        fields = msgspec.to_builtins(asked(name, path, number, **more))
        return self.adapters.adding(fields)(self.core)

    def enter(self, name: str, path: Path, number: int = 1, request_id: str = "") -> Any:
        """A request enters the engine. Returns its LoRARequest there."""
        named = name if "@" in name else identity(name, content(str(path)))
        request = SimpleNamespace(lora_request=self.adapters.named(asked(named, path, number)))
        hashed = request.lora_request
        self.adapters.admit(self.core, request)
        own = request.lora_request
        assert (hashed.lora_name, hashed.lora_path) == (own.lora_name, own.lora_path)
        if request_id:
            self.core.scheduler.requests[request_id] = request
        return own


@pytest.mark.parametrize("load_inplace", [False, True])
def test_other_files_at_the_same_path_are_another_adapter(
    load_inplace: bool, tmp_path: Path
) -> None:
    """vLLM knows cached KV by the adapter's name and path. Nothing of the old files may be hit."""
    worker, path = Worker(), an_adapter(tmp_path / "a", b"A")
    old = worker.add("x", path)
    assert worker.add(identity("x", old), path, load_inplace=load_inplace) == old
    assert len(worker.core.loads) == 1, "the same files are the same adapter"
    before = worker.enter(identity("x", old), path)
    weights = path / "adapter_model.safetensors"
    kept = weights.stat()
    weights.write_bytes(b"B")
    os.utime(weights, ns=(kept.st_atime_ns, kept.st_mtime_ns))  # as `cp -p` may do
    new = worker.add("x", path, load_inplace=load_inplace)
    assert new == content(str(path)) != old
    after = worker.enter(identity("x", new), path)
    assert (worker.core.step(before), worker.core.step(after)) == (b"A", b"B")
    assert before.lora_name != after.lora_name
    other = Worker()  # one that has started since
    with pytest.raises(BadMessage, match=f"x: {path} has other files than those that were loaded"):
        other.enter(identity("x", old), path)
    assert (other.core.held, len(list(tmp_path.glob("pullfill-*/*")))) == ({}, 2), "no copy stays"


def test_copies_of_files_are_kept_for_requests_and_as_many_as_vllm_keeps(tmp_path: Path) -> None:
    """Two frontends may give two adapters one number. New ones push out one that a request uses:
    its next step loads that again, from files that may have changed."""
    worker = Worker(most=2)
    paths = [an_adapter(tmp_path / name, name.encode()) for name in "abcd"]
    a, b, c = (worker.enter(path.name, path, request_id=path.name) for path in paths[:3])
    assert all(Path(own.lora_path).exists() for own in (a, b, c)), "three requests use them"
    assert len({own.lora_int_id for own in (a, b, c)}) == 3
    del worker.core.scheduler.requests["a"], worker.core.scheduler.requests["c"]
    d = worker.enter("d", paths[3], request_id="d")
    assert [Path(own.lora_path).exists() for own in (a, b, c, d)] == [False, True, False, True]
    shutil.rmtree(paths[1])
    assert worker.core.step(b) == b"b"
    again = worker.enter("a", paths[0])
    assert (again.lora_path, worker.core.step(again)) == (a.lora_path, b"a")
    assert again.lora_int_id > d.lora_int_id, "vLLM may still have the other one"
    with pytest.raises(BadMessage, match="rank 64"):
        worker.enter("broken", paths[0])
    assert Path(again.lora_path).exists(), "what fails pushes nothing out"


def test_a_frontend_that_lags_behind_is_refused_and_a_newer_one_is_not(tmp_path: Path) -> None:
    worker = Worker()
    a, b = an_adapter(tmp_path / "a", b"A"), an_adapter(tmp_path / "b", b"B")
    old, new = worker.add("x", a), worker.add("x", b)
    worker.enter(identity("x", old), a, 5)
    worker.add(identity("x", new), b, 6)
    with pytest.raises(BadMessage, match="loaded again with other files: send the request again"):
        worker.enter(identity("x", old), a, 5)
    worker.enter(identity("x", old), a, 7)
    with pytest.raises(BadMessage, match="loaded again"):
        worker.enter(identity("x", new), b, 6)
    worker.enter(identity("x", old), a, 6)  # the same files, however often they were loaded
    worker.enter(identity("y", new), b, 6)


def test_others_are_told_name_path_and_digest(tmp_path: Path) -> None:
    worker, path = Worker(), an_adapter(tmp_path / "a")
    own = worker.enter("x", path)
    told = Adapter(name="x", path=str(path), content=content(str(path)))
    assert worker.adapters.for_others(own) == told
    other = Adapters()
    core = Core()
    assert not other.has(told)
    loaded = other.load(core, other.named(lora_request(told)))
    assert other.has(told)
    assert (loaded.lora_name, core.step(loaded)) == (own.lora_name, b"w")
    assert worker.adapters.placed(lora_request(told)).lora_path == own.lora_path, "hashed equally"
    assert worker.adapters.for_others(asked("x", path)) is None, "it is not loaded here"
    assert worker.adapters.for_others(worker.enter("x" * (MAX_TEXT + 1), path)) is None


def test_an_adapter_of_another_layout_is_another_one_and_prefilled_here(tmp_path: Path) -> None:
    """A job does not say that its adapter is 3D."""
    worker, path = Worker(), an_adapter(tmp_path / "a")
    told = worker.add("x", path, is_3d_lora_weight=True)
    assert told == f"{content(str(path))}-3d"
    named = worker.adapters.named(asked(identity("x", told), path, is_3d_lora_weight=True))
    assert worker.adapters.for_others(worker.adapters.load(worker.core, named)) is None
    assert worker.add("x", path) == content(str(path))


@pytest.mark.parametrize("second", ["misshapen", "a"])
def test_what_vllm_keeps_of_a_failed_adapter_is_never_another_ones(
    second: str, tmp_path: Path
) -> None:
    worker, path = Worker(), an_adapter(tmp_path / "a")
    with pytest.raises(BadMessage, match="size of tensor"):
        worker.enter("misshapen", path)
    assert worker.core.held == {}
    if second == "misshapen":
        with pytest.raises(BadMessage, match="size of tensor"):
            worker.enter("misshapen", path)
        return
    own = worker.enter("a", path)
    assert worker.core.held == {own.lora_int_id: b"w"}


def test_a_full_disk_refuses_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, path = Worker(), an_adapter(tmp_path / "a")

    def full() -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", full)
        with pytest.raises(BadMessage, match=rf"{path} to {tmp_path} \(TMPDIR\): .* No space left"):
            worker.enter("x", path)
    worker.enter("x", path)


def test_files_that_are_gone_refuse_a_load_and_leave_the_adapter_as_it_was(tmp_path: Path) -> None:
    worker, path = Worker(), an_adapter(tmp_path / "a")
    own = worker.enter("x", path)
    shutil.rmtree(path)
    with pytest.raises(BadMessage, match=f"Loading lora x failed: No adapter found for {path}"):
        worker.add("x", path, load_inplace=True)  # vLLM's words, which it answers with a 404
    assert worker.enter(own.lora_name, path) is own


@pytest.mark.parametrize(
    "fields", [[], ["a"], ["a", 0, "/p"], ["a", 1, ""], ["a", 1, 5], "a", None]
)
def test_nonsense_from_a_frontend_is_refused(fields: Any) -> None:
    load = Adapters().adding(fields)
    with pytest.raises(BadMessage):
        load(Core())


async def test_a_drive_that_hangs_holds_one_thread_and_none_of_others() -> None:
    """The default executor has few threads, and connecting needs them too."""
    go, reads = threading.Event(), list[str]()

    def read(path: str) -> str:
        reads.append(path)
        go.wait(20)
        return "digest"

    files = AdapterFiles(read)
    for _ in range(40):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.002):
                await files.content("/hangs")
    async with asyncio.timeout(10):
        assert await asyncio.to_thread(int) == 0
    assert len(reads) <= 1
    waiting = asyncio.create_task(files.content("/hangs"))
    go.set()
    assert await waiting == "digest"
    assert reads == ["/hangs"]
    assert await AdapterFiles().content("/none") == ""


async def test_a_prefill_worker_takes_a_job_only_with_the_files_that_the_job_names(
    tmp_path: Path,
) -> None:
    """Of one adapter it may have a copy, whatever is at its path now."""
    path, worker = an_adapter(tmp_path / "x", b"old"), Worker(most=1)
    parts: Any = SimpleNamespace(adapters=worker.adapters, groups=SimpleNamespace(layers=()))
    none: Any = None
    engine = PrefillEngine(none, {}, parts, lambda _: 0)
    old = Adapter(name="x", path=str(path), content=content(str(path)))
    await engine.check_adapter(old)
    worker.adapters.load(worker.core, worker.adapters.named(lora_request(old)))
    (path / "adapter_model.safetensors").write_bytes(b"new")
    new = msgspec.structs.replace(old, content=content(str(path)))
    for job in (old, new):
        await engine.check_adapter(job)
    own = worker.adapters.load(worker.core, worker.adapters.named(lora_request(old)))
    assert worker.core.step(own) == b"old"

    own = worker.adapters.load(worker.core, worker.adapters.named(lora_request(new)))
    assert worker.core.step(own) == b"new"  # there is room for one copy
    with pytest.raises(OutOfReach, match="has other files"):
        await engine.check_adapter(old)
    # The copy may also go between that look and the request.
    with pytest.raises(BadMessage, match="has other files"):
        worker.adapters.load(worker.core, worker.adapters.named(lora_request(old)))


def test_an_adapter_that_fails_in_one_rank_is_in_no_rank(tmp_path: Path) -> None:
    ranks = [Core(), Core()]
    ranks[1].vllm_config.lora_config.max_cpu_loras = 0  # its last adapter cannot be dropped

    class Ranks(Core):
        def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[Any]:
            return [found for rank in ranks for found in rank.collective_rpc(method, args)]

    worker = Worker()
    worker.core = Ranks()
    with pytest.raises(BadMessage, match="cannot be loaded"):
        worker.enter("a", an_adapter(tmp_path / "a"))
    assert [(rank.held, rank.broken) for rank in ranks] == [({}, False)] * 2
