"""LoRA adapters are known by their files, and each worker numbers them itself."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.adapters import AdapterFiles, Adapters, content
from pullfill.errors import BadMessage
from tests.support.waiting import eventually


class Core:
    """Loads every adapter but those named `broken`."""

    def __init__(self, enabled: bool = True) -> None:
        self.vllm_config = SimpleNamespace(lora_config=object() if enabled else None)
        self.loaded: list[Any] = []

    def add_lora(self, asked: Any) -> None:
        if asked.lora_name == "broken":
            raise ValueError("rank 64 is greater than max_lora_rank 16")
        self.loaded.append(asked)


def asked(name: str, path: Path, number: int = 1, **more: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path), **more)


def an_adapter(directory: Path, weights: bytes = b"w") -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def test_content_is_that_of_all_files_wherever_they_are(tmp_path: Path) -> None:
    one, same = an_adapter(tmp_path / "one"), an_adapter(tmp_path / "same")
    assert content(str(one)) == content(str(same))
    (same / "adapter_model.safetensors").write_bytes(b"x")
    assert content(str(one)) != content(str(same))
    (one / "adapter_model.safetensors").rename(one / "adapter_model.bin")
    assert content(str(one)) != content(str(an_adapter(tmp_path / "third")))
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
    (path / "adapter_model.safetensors").write_bytes(b"changed")
    adapters.load(core, asked("a", path, load_inplace=True))
    assert adapters.content_of(own) == before, "a request does not load it again"
    assert adapters.add(core, ["a", 9, str(path), None, True])
    eventually(lambda: adapters.content_of(own) == content(str(path)), "they were read again")
    assert [lora.load_inplace for lora in core.loaded] == [False, True]


def test_a_late_look_at_the_files_does_not_hide_a_newer_one(tmp_path: Path) -> None:
    path, held, reads = an_adapter(tmp_path / "a"), threading.Event(), []

    def read(_: str) -> str:
        reads.append(len(reads))
        if reads[-1] == 0:
            held.wait(10)
            return "old"
        return "new"

    core, adapters = Core(), Adapters(read)
    own = adapters.load(core, asked("a", path))
    eventually(lambda: bool(reads), "the first look has begun")
    adapters.load(core, asked("a", path), again=True)
    eventually(lambda: adapters.content_of(own) == "new", "the second look is over")
    held.set()
    looks = [t for t in threading.enumerate() if t.name == "pullfill-adapter"]
    eventually(lambda: not any(t.is_alive() for t in looks), "the first look is over")
    assert adapters.content_of(own) == "new"


@pytest.mark.parametrize(
    ("name", "enabled", "why"), [("broken", True, "rank 64"), ("a", False, "--enable-lora")]
)
def test_an_adapter_that_cannot_be_loaded_is_refused(
    name: str, enabled: bool, why: str, tmp_path: Path
) -> None:
    adapters = Adapters()
    with pytest.raises(BadMessage, match=why):
        adapters.load(Core(enabled), asked(name, tmp_path))
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
