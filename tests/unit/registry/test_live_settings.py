"""Router and queue settings: what is read, what is refused and why."""

from __future__ import annotations

import msgspec
import pytest

from pullfill.errors import ConfigError
from pullfill.registry import live_settings
from pullfill.registry.watch import Put
from pullfill.wire import QueueSettings, RouterConfig


def test_settings_parse() -> None:
    assert live_settings.parse(b"{}", RouterConfig) == RouterConfig()
    assert (
        live_settings.parse(b'{"max_prefill_queue_size":3}', RouterConfig).max_prefill_queue_size
        == 3
    )
    for bad, told in {
        b'{"policy":"sometimes"}': "policy.*always_local",
        b'{"remote_timeout_s":0}': "remote_timeout_s.*more than 0",
        b'{"max_local_prefill_length":"7"}': "max_local_prefill_length.*whole number",
        b"\xff": "router settings",
    }.items():
        with pytest.raises(ConfigError, match=told):
            live_settings.parse(bad, RouterConfig)


def test_what_another_build_has_written_is_kept_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can type it: `pullfill config` finds no such setting."""
    stored = b'{"polcy":"conditional","hedge":true}'
    watched = live_settings.Settings(None, "ns", RouterConfig)  # type: ignore[arg-type]
    watched._on_event(Put(b"/pullfill/ns/config/router", stored, 1))
    assert watched.current == RouterConfig(hedge=True)
    assert "unknown router settings in etcd: polcy" in caplog.text
    with pytest.raises(ConfigError, match=r"'router\.polcy' \(did you mean router\.policy"):
        live_settings.find("router.polcy")


@pytest.mark.parametrize("kind", [RouterConfig, QueueSettings])
def test_each_setting_says_what_it_may_be(kind: type[RouterConfig] | type[QueueSettings]) -> None:
    for name in kind.__struct_fields__:
        with pytest.raises(ConfigError, match=f"{name}: 'x' is not allowed: must be "):
            live_settings._from_text(kind, name, "x")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("policy", "always_remote", "always_remote"), ("remote_timeout_s", " 2.5 ", 2.5),
     ("max_prefill_queue_size", "0", 0)],
)  # fmt: skip
def test_settings_text(name: str, text: str, value: object) -> None:
    assert live_settings._from_text(RouterConfig, name, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("policy", "Conditional"), ("remote_timeout_s", "nan"), ("remote_timeout_s", "inf"),
     ("remote_timeout_s", "-1"), ("max_prefill_queue_size", "1.5"),
     ("max_local_prefill_length", ""), ("max_local_prefill_length", "null")],
)  # fmt: skip
def test_settings_bad_text_names_the_setting_and_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"router.{name}.*must be"):
        live_settings._from_text(RouterConfig, name, text)


def test_setting_one_field_repairs_a_bad_key() -> None:
    stored = b'{"policy":"nonsense","max_prefill_queue_size":9,"newer":1}'
    assert live_settings._good_fields(stored, RouterConfig) == {
        "max_prefill_queue_size": 9,
        "newer": 1,
    }
    assert live_settings._good_fields(b"[]", RouterConfig) == {}
    with pytest.raises(ConfigError, match=r"router\.policy"):
        live_settings.find("router.colour")


def test_queue_settings_are_all_unset_until_somebody_sets_them() -> None:
    assert set(msgspec.to_builtins(live_settings.parse(b"{}", QueueSettings)).values()) == {None}
    assert live_settings.parse(b'{"replicas":3}', QueueSettings) == QueueSettings(replicas=3)


def test_a_queue_setting_is_only_found_by_its_whole_name() -> None:
    assert live_settings.find("queue.replicas") == (QueueSettings, "replicas")
    assert (
        live_settings.find("policy")
        == live_settings.find("router.policy")
        == (RouterConfig, "policy")
    )
    for key in ("replicas", "router.replicas", "queue.policy"):
        with pytest.raises(ConfigError, match=r"no setting.*queue\.max_bytes"):
            live_settings.find(key)


@pytest.mark.parametrize(
    ("name", "text"),
    [("replicas", "0"), ("replicas", "6"), ("max_bytes", "-1"), ("max_bytes", "1G"),
     ("max_jobs", "0"), ("ack_wait_s", "0.1"), ("ack_wait_s", "nan"), ("max_deliver", "none"),
     ("max_deliver", "null"), ("publish_timeout_s", "0"), ("publish_timeout_s", "61")],
)  # fmt: skip
def test_queue_settings_refuse_bad_text(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"queue.{name}.*must be .*unset"):
        live_settings._from_text(QueueSettings, name, text)
