"""The demo checkpoint: tokenizer, template, and how it comes to lie in its directory."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest

from pullfill.demo import checkpoint as demo
from pullfill.demo.recipe import DEMO, Recipe
from pullfill.demo.tokenizer import CHAT_TEMPLATE, build_tokenizer
from tests.support.late import Late

torch: Any = Late("torch")
weights: Any = Late("pullfill.demo.recipe")
llama: Any = Late("tests.support.llama")

SMALL = Recipe(
    hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, vocab=268, max_positions=128
)
FIXED = build_tokenizer(384)


# ------------------------------------------------------------------ chat template


def _render(messages: list[dict[str, object]], **more: object) -> str:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = json.dumps  # as the servers do: no HTML escapes
    return env.from_string(CHAT_TEMPLATE).render(messages=messages, **more)


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'], ids=["dict", "text"])
def test_template_renders_tools(arguments: object) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    text = _render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "no"},
        ],
        tools=[tool],
    )
    head, _, rest = text.partition("<tools>\n")
    assert head.startswith("<|system|>Be brief.\nFunctions")
    assert "<|end|><|user|>Rain?<|end|><|assistant|>" in rest
    assert json.loads(rest.partition("\n</tools>")[0]) == tool
    called = rest.rpartition("<tool_call>\n")[2].partition("\n</tool_call>")[0]
    assert json.loads(called) == {"name": "weather", "arguments": {"city": "Köln"}}
    assert text.endswith("<|tool|><tool_response>\nno\n</tool_response><|end|>")


# ------------------------------------------------------------------ ensure


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OSError, match="not empty"):
        demo.ensure_demo_model(tmp_path, SMALL)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert not list(tmp_path.parent.glob("*.new"))


def _race(where: Path, log: Path, gate: object) -> None:
    from safetensors import torch as files

    save = files.save_file

    def counted(*args: object) -> None:
        with log.open("a") as handle:
            handle.write(f"{os.getpid()}\n")
        save(*args)

    files.save_file = counted
    gate.wait()  # type: ignore[attr-defined]
    demo.ensure_demo_model(where, SMALL)
    llama.Llama.load(SMALL, where)  # complete as soon as ensure returns


def test_concurrent_callers_build_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    gate, log = spawn.Barrier(4), tmp_path / "builds"
    children = [spawn.Process(target=_race, args=(tmp_path / "m", log, gate)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 4
    assert len(log.read_text().split()) == 1


# ------------------------------------------------------------------ the models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model behind `--model demo`."""
    where = demo.ensure_demo_model(tmp_path_factory.mktemp("demo") / "m")
    return llama.Llama.load(DEMO, where)


def chats(length: int) -> Any:
    """Four prompts of `length` tokens that differ in one."""
    text = " A prompt long enough to be worth sending away." * 40
    ids = [FIXED.encode(f"<|user|>{i}{text}").ids[:length] for i in range(4)]
    return torch.tensor(ids)


def test_the_demo_model_answers_each_prompt_differently_and_without_a_loop(model: Any) -> None:
    cache: dict[int, Any] = {}
    with torch.no_grad():
        said = [model.logits(chats(24), cache)[:, -1:].argmax(dim=-1)]
        while len(said) < 48:
            said.append(model.logits(said[-1], cache).argmax(dim=-1))
        whole = torch.cat((chats(24), *said), dim=1)
        assert torch.equal(model.logits(whole)[:, 23:-1].argmax(dim=-1), whole[:, 24:])
    said = whole[:, 24:].tolist()
    assert len({tuple(answer) for answer in said}) == 4
    for answer in said:
        assert len(set(answer)) >= 16, FIXED.decode(answer)
        end = answer[24:]
        assert not [n for n in range(1, 9) if end[n:] == end[:-n]], FIXED.decode(answer)
        assert FIXED.decode(answer).isascii()
        assert FIXED.decode(answer).isprintable()


def test_the_demo_model_feels_each_changed_token(model: Any) -> None:
    length = 400
    (prompt, *_) = chats(length)
    places = range(0, length, length // 8)
    rows = prompt.repeat(len(places), 1)
    for row, place in zip(rows, places, strict=True):
        row[place] = 7 + (row[place] + 30) % 300
    with torch.no_grad():
        before = model.logits(prompt[None])[0, -1].log_softmax(-1)
        after = torch.cat([model.logits(row[None])[:, -1] for row in rows]).log_softmax(-1)
    likely = before > math.log(0.01)
    moved = (after - before)[:, likely].abs().amax(dim=1)
    assert moved.min() > 1e-2, moved
