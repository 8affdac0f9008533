"""Router and queue settings: what is read, what is refused and why."""

from __future__ import annotations

import json

import pytest

from pullfill.errors import ConfigError
from pullfill.registry import live_settings
from pullfill.registry.watch import Put
from pullfill.wire import QueueSettings, RouterConfig


def test_what_another_build_has_written_is_kept_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can type it: `pullfill config` finds no such setting."""
    stored = b'{"polcy":"conditional","refuse_s":7}'
    watched = live_settings.Settings(None, "ns", RouterConfig)  # type: ignore[arg-type]
    watched._on_change(Put(b"/pullfill/ns/config/router", stored))
    assert watched.current == RouterConfig(refuse_s=7)
    assert "unknown router settings in etcd: polcy" in caplog.text
    with pytest.raises(ConfigError, match=r"'router\.polcy' \(did you mean router\.policy"):
        live_settings.find("router.polcy")


@pytest.mark.parametrize("kind", [RouterConfig, QueueSettings])
def test_each_setting_says_what_it_may_be(kind: type[RouterConfig] | type[QueueSettings]) -> None:
    for name in kind.__struct_fields__:
        with pytest.raises(ConfigError, match=f"{name}: 'x' is not allowed: must be "):
            live_settings._from_text(kind, name, "x")


def test_other_fields_are_written_again_as_they_are() -> None:
    stored = b'{"policy":"nonsense","max_prefill_queue_size":9,"newer":1}'
    assert live_settings.stored(stored) == json.loads(stored)
    assert live_settings.stored(b"[]") == live_settings.stored(b"\xff") == {}
