"""What a frontend refuses at its start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import front_app
from pullfill.errors import ConfigError
from tests.support.checkpoint import tiny_checkpoint
from tests.support.late import Late

arg_utils: Any = Late("vllm.engine.arg_utils")


def test_a_pooling_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its routes would be missing: the app is made for models that generate."""
    made = SimpleNamespace(runner_type="pooling")
    monkeypatch.setattr(arg_utils.AsyncEngineArgs, "create_model_config", lambda _: made)
    with pytest.raises(ConfigError, match=f"'{tmp_path}' is a pooling model"):
        front_app.prepare(str(tmp_path), [])


def test_a_frontend_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CUDA build finds no platform on a host without a GPU."""
    monkeypatch.setattr("vllm.platforms.builtin_platform_plugins", {})
    monkeypatch.setattr("vllm.platforms._current_platform", None)
    prepared = front_app.prepare(str(tiny_checkpoint()), [])
    assert prepared.config.device_config.device_type == "cpu"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-model-len", "abc"], "--max-model-len: invalid .* value: 'abc'"),
        (["--hf-overrides"], "expected one argument"),
        (["--compilation-config", "5x"], "Invalid JSON"),
        (["--config", "bad.yaml"], "expected ',' or ']'"),
        (["--config", "none.yaml"], "No such file"),
        (["--chat-template", "/none.jinja"], "doesn't exist"),
        (["--tokenizer", "/none"], "'/none'"),
    ],
)
def test_what_vllms_parser_refuses_is_one_line(
    flags: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("max-model-len: [1\n")
    with pytest.raises(ConfigError, match=says) as refused:
        front_app.prepare(str(tiny_checkpoint()), flags)
    assert "\n" not in str(refused.value)
