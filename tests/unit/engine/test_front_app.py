"""What a frontend refuses at its start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import front_app
from pullfill.errors import ConfigError
from tests.support.late import Late

arg_utils: Any = Late("vllm.engine.arg_utils")


def test_a_pooling_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its routes would be missing: the app is made for models that generate."""
    made = SimpleNamespace(runner_type="pooling")
    monkeypatch.setattr(arg_utils.AsyncEngineArgs, "create_model_config", lambda _: made)
    with pytest.raises(ConfigError, match=f"'{tmp_path}' is a pooling model"):
        front_app.prepare(str(tmp_path), [], "127.0.0.1", 1)
