"""LoRA adapters are known by their files, and each worker numbers them itself."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill.engine.adapters import AdapterFiles, Adapters, content
from pullfill.errors import BadMessage
from tests.support.late import Late
from tests.support.waiting import eventually

lora: Any = Late("vllm.lora.request")


class Core:
    """Loads adapters as vLLM does, all but those named `broken` and those without files.

    loaded: those that were loaded from their files.
    held: the adapter that vLLM computes with, by number. At most `most`.
    broken: whether a rank has raised. Then vLLM mixes up the answers of the ranks."""

    def __init__(self, enabled: bool = True, most: int = 8) -> None:
        self.broken = False
        config = SimpleNamespace(max_cpu_loras=most)
        self.vllm_config = SimpleNamespace(lora_config=config if enabled else None)
        self.loaded: list[Any] = []
        self.held: dict[int, Any] = {}

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[Any]:
        try:
            return [method(self, *args)]
        except Exception:
            self.broken = True
            raise

    def add_lora(self, asked: Any) -> None:
        number = asked.lora_int_id
        if asked.lora_name == "broken":
            raise ValueError("rank 64 is greater than max_lora_rank 16")
        if number in self.held:
            return  # it has this one, as far as it knows
        if not list(Path(asked.lora_path).iterdir()):
            raise FileNotFoundError(f"no adapter at {asked.lora_path}")
        while len(self.held) >= self.vllm_config.lora_config.max_cpu_loras:
            del self.held[next(iter(self.held))]
        self.held[number] = asked
        if asked.lora_name == "misshapen":  # known only when vLLM copies it to its place
            raise RuntimeError("The size of tensor a (64) must match that of tensor b (32)")
        self.loaded.append(asked)

    def remove_lora(self, number: int) -> bool:
        return self.held.pop(number, None) is not None

    def list_loras(self) -> set[int]:
        return set(self.held)


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


def test_one_number_of_two_frontends_is_two_adapters_here(tmp_path: Path) -> None:
    core, adapters = Core(), Adapters()
    first = adapters.load(core, asked("a", an_adapter(tmp_path / "a"), number=1))
    second = adapters.load(core, asked("b", an_adapter(tmp_path / "b"), number=1))
    again = adapters.load(core, asked("a", tmp_path / "a", number=7))
    assert (first.lora_int_id, second.lora_int_id, again.lora_int_id) == (1, 2, 1)
    assert [lora.lora_name for lora in core.loaded] == ["a", "b"], "each is loaded once"


def test_what_was_loaded_is_known_by_its_files_of_that_moment(tmp_path: Path) -> None:
    core, adapters = Core(), Adapters()
    path = an_adapter(tmp_path / "a")
    own = adapters.load(core, asked("a", path))
    eventually(lambda: bool(adapters.content_of(own)), "its files were read")
    before = adapters.content_of(own)
    assert before == content(str(path))
    assert adapters.same("a", str(path), before) is own
    assert adapters.same("a", str(path), "another") is None
    assert adapters.same("b", str(path), before) is None
    (path / "adapter_model.safetensors").write_bytes(b"changed")
    assert adapters.load(core, asked("a", path, load_inplace=True)) is own, "no request loads it"
    assert adapters.content_of(own) == before


def looks_are_over() -> None:
    looks = [t for t in threading.enumerate() if t.name == "pullfill-adapter"]
    eventually(lambda: not any(t.is_alive() for t in looks), "its files were read")


@pytest.mark.parametrize("changed", [False, True])
def test_an_adapter_that_is_loaded_again_stays_remote_only_with_the_same_files(
    changed: bool, tmp_path: Path
) -> None:
    """vLLM finds cached KV by the adapter's name and path, also KV of the old files."""
    core, adapters = Core(), Adapters()
    path = an_adapter(tmp_path / "a")
    own = adapters.load(core, asked("a", path))
    looks_are_over()
    if changed:
        (path / "adapter_model.safetensors").write_bytes(b"changed")
    assert adapters.add(core, msgspec.to_builtins(asked("a", path, 9, load_inplace=True)))
    assert [lora.lora_int_id for lora in core.loaded] == [1, 2]
    assert adapters.content_of(own) == ""
    looks_are_over()
    again = adapters.load(core, asked("a", path))
    assert again.lora_int_id == 2
    assert adapters.content_of(again) == ("" if changed else content(str(path)))


@pytest.mark.parametrize("changed", [False, True])
def test_a_late_look_at_the_files_counts_for_nothing(
    changed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the files were changed between the two loads, nobody knows the digest of the first ones,
    and KV of them may be cached. If not, the second look finds the digest of both."""
    path, held, reads = an_adapter(tmp_path / "a"), threading.Event(), []

    def read(_: str) -> str:
        reads.append(len(reads))
        if reads[-1] == 0:
            held.wait(10)
        return "new"

    core, adapters = Core(), Adapters(read)
    own = adapters.load(core, asked("a", path))
    eventually(lambda: bool(reads), "the first look has begun")
    if changed:
        (path / "adapter_model.safetensors").write_bytes(b"other")
    again = adapters.load(core, asked("a", path), again=True)
    held.set()
    looks_are_over()
    assert (adapters.content_of(own), adapters.content_of(again)) == ("", "" if changed else "new")
    assert ("KV of its old files" in caplog.text) == changed


def test_files_that_change_before_the_look_at_them_are_not_taken_for_those_that_were_loaded(
    tmp_path: Path,
) -> None:
    """A prefill worker with the new files would compute with other weights."""
    path, go = an_adapter(tmp_path / "a"), threading.Event()

    def late(path: str) -> str:
        go.wait(10)
        return content(path)

    core, adapters = Core(), Adapters(late)
    own = adapters.load(core, asked("a", path))
    (path / "adapter_model.safetensors").write_bytes(b"changed")
    go.set()
    looks_are_over()
    assert adapters.content_of(own) == ""


@pytest.mark.parametrize("second", ["misshapen", "a"])
def test_what_vllm_keeps_of_a_failed_adapter_is_never_another_ones(
    second: str, tmp_path: Path
) -> None:
    core, adapters = Core(), Adapters()
    path = an_adapter(tmp_path / "a")
    with pytest.raises(BadMessage, match="size of tensor"):
        adapters.load(core, asked("misshapen", path))
    assert core.held == {}
    if second == "misshapen":
        with pytest.raises(BadMessage, match="size of tensor"):
            adapters.load(core, asked("misshapen", path))
        return
    own = adapters.load(core, asked("a", path))
    assert core.held == {own.lora_int_id: own}
    looks_are_over()


def test_a_failed_reload_leaves_the_adapter_as_it_was(tmp_path: Path) -> None:
    core, adapters = Core(), Adapters()
    path = an_adapter(tmp_path / "a")
    own = adapters.load(core, asked("a", path))
    for file in path.iterdir():
        file.unlink()
    with pytest.raises(BadMessage, match="no adapter"):
        adapters.load(core, asked("a", path), again=True)
    assert adapters.load(core, asked("a", path)) is own
    assert core.held == {own.lora_int_id: own}
    looks_are_over()


def test_files_that_are_gone_refuse_a_request_and_end_no_engine(tmp_path: Path) -> None:
    """vLLM has dropped the adapter, and would load it again in the step that needs it."""
    core, adapters = Core(most=1), Adapters()
    path = an_adapter(tmp_path / "a")
    own = adapters.load(core, asked("a", path))
    other = adapters.load(core, asked("b", an_adapter(tmp_path / "b")))
    assert adapters.load(core, asked("a", path)) is own, "vLLM will load the same files again"
    kept = [(file, file.read_bytes()) for file in path.iterdir()]
    for file, _ in kept:
        file.unlink()
    with pytest.raises(BadMessage, match="no adapter"):
        adapters.load(core, asked("a", path))
    assert adapters.load(core, asked("b", tmp_path / "b")) is other
    for file, data in kept:
        file.write_bytes(data)
    again = adapters.load(core, asked("a", path))
    assert core.held == {again.lora_int_id: again}
    looks_are_over()


def test_an_adapter_of_another_layout_is_prefilled_here(tmp_path: Path) -> None:
    """A job does not say that its adapter is 3D."""
    core, adapters = Core(), Adapters()
    own = adapters.load(core, asked("a", an_adapter(tmp_path / "a"), is_3d_lora_weight=True))
    looks_are_over()
    assert adapters.content_of(own) == ""


@pytest.mark.parametrize(
    ("name", "enabled", "why"), [("broken", True, "rank 64"), ("a", False, "--enable-lora")]
)
def test_an_adapter_that_cannot_be_loaded_is_refused(
    name: str, enabled: bool, why: str, tmp_path: Path
) -> None:
    adapters, core = Adapters(), Core(enabled)
    with pytest.raises(BadMessage, match=why):
        adapters.load(core, asked(name, an_adapter(tmp_path / "a")))
    assert not core.broken
    assert adapters.content_of(asked(name, tmp_path)) == ""


@pytest.mark.parametrize(
    "fields", [[], ["a"], ["a", 0, "/p"], ["a", 1, ""], ["a", 1, 5], "a", None]
)
def test_nonsense_from_a_frontend_is_refused(fields: Any) -> None:
    with pytest.raises(BadMessage):
        Adapters().add(Core(), fields)


async def test_files_are_read_again_only_when_they_have_changed(tmp_path: Path) -> None:
    reads = []

    def read(path: str) -> str:
        reads.append(path)
        return content(path)

    path, files = an_adapter(tmp_path / "a"), AdapterFiles(read)
    first = await files.content(str(path))
    assert await files.content(str(path)) == first == content(str(path))
    assert len(reads) == 1
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(b"W")
    os.utime(weights, ns=(1, 1))
    assert await files.content(str(path)) == content(str(path)) != first
    assert await files.content(str(tmp_path / "none")) == ""


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


def test_an_adapter_that_fails_in_one_rank_is_in_no_rank(tmp_path: Path) -> None:
    ranks = [Core(), Core()]
    ranks[1].vllm_config.lora_config.max_cpu_loras = 0  # its last adapter cannot be dropped

    class Ranks(Core):
        def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[Any]:
            return [found for rank in ranks for found in rank.collective_rpc(method, args)]

    with pytest.raises(BadMessage, match="cannot be loaded"):
        Adapters().load(Ranks(), asked("a", an_adapter(tmp_path / "a")))
    assert [(rank.held, rank.broken) for rank in ranks] == [({}, False)] * 2
