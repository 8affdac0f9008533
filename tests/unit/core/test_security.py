"""The security file: what is read, what is refused, and that no secret is ever shown."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import plan, run_role
from pullfill.errors import ConfigError, NotNow
from pullfill.net.security import OPEN, Security, load
from tests.support.certificates import make_certificates
from tests.support.state_dir import recorded

KEY = "0123456789abcdef" * 2
PASSWORD = "correct horse battery"


def secret(path: Path, text: str, mode: int = 0o600) -> Path:
    path.touch(0o600)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that has everything."""
    tls = make_certificates(tmp_path / "tls")
    secret(tmp_path / "password", f"{PASSWORD}\n")
    secret(tmp_path / "cluster.key", f"{KEY}\n")
    secret(tmp_path / "api.keys", "first-api-key-0123\nsecond-api-key-456\n")
    secret(tmp_path / "admin.keys", "the-admin-key-0123\n")
    server = (
        'user = "pullfill"\npassword_file = "password"\n'
        f'ca = "tls/ca.pem"\ncert = "{tls.cert}"\nkey = "tls/key.pem"\n'
    )
    path = tmp_path / "security.toml"
    path.write_text(
        f'[nats]\n{server}\n[etcd]\n{server}\n[cluster]\nkey_file = "cluster.key"\n'
        '[frontend]\napi_key_file = "api.keys"\nadmin_key_file = "admin.keys"\n'
        'stock_key_file = "password"\n'
    )
    return path


def test_everything_is_read_and_relative_to_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    security = load(file)
    assert security.nats.options()["password"] == PASSWORD
    assert security.etcd.login() == ("pullfill", PASSWORD)
    assert security.etcd.tls() is not None
    assert security.frontend.api_keys() == ("first-api-key-0123", "second-api-key-456")
    assert security.frontend.admin_keys() == ("the-admin-key-0123",)
    assert security.frontend.stock_key() == PASSWORD
    assert security.cluster.load() is not None
    assert load(None) == OPEN
    assert OPEN.nats.options() == {}


def test_nothing_printed_holds_a_secret(file: Path) -> None:
    security = load(file)
    shown = (
        repr(security)
        + repr(security.cluster.load())
        + str(ClusterRef("n", "e", "q", None, security))
    )
    for text in (PASSWORD, KEY, "first-api-key", "the-admin-key"):
        assert text not in shown


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("[nats]\nuser = 'u'", "both user and password_file"),
        ("[etcd]\ncert = 'tls/cert.pem'", "both cert and key"),
        ("[nats]\nusr = 'u'", "unknown field `usr` - at `$.nats`; docs/operations.md lists"),
        ("[nat]\nuser = 'u'", "unknown field `nat`"),
        ("path = 'x'", "unknown field `path`"),
        ("[nats", "Expected ']'"),
        ("[nats]\nca = 'gone'", "[nats] ca: cannot read"),
        ("[nats]\nca = 'password'", "no usable PEM file"),
        ("[nats]\ntoken_file = 'password'\ncredentials = 'password'", "takes one of"),
        ("[nats]\ncredentials = 'password'", "is no NATS .creds file"),
        ("[cluster]\nkey_file = 'password'", "at least 32 are needed"),
        ("[cluster]\nkey_file = '/dev/zero'", "not a regular file"),
        ("[cluster]\nkey_file = 'open.key'", "is open to others: chmod 600"),
        ("[frontend]\napi_key_file = 'empty'", "16 characters or more"),
        ("[etcd]\nuser = 'u'\npassword_file = 'two lines'", "one line of text"),
    ],
)
def test_mistakes_are_told_in_one_line_that_names_the_file(
    file: Path, text: str, advice: str
) -> None:
    secret(file.parent / "open.key", KEY, 0o644)
    secret(file.parent / "empty", "")
    secret(file.parent / "short", "abc\n")
    secret(file.parent / "two lines", "ab\ncd\n")
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    said = str(caught.value)
    assert any(part in said for part in advice.split("|"))
    assert "\n" not in said
    assert PASSWORD not in said
    assert KEY not in said


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o400, True), (0o440, True), (0o620, False), (0o604, False)]
)
@pytest.mark.essential
def test_permissions(tmp_path: Path, mode: int, fine: bool) -> None:
    secret(tmp_path / "k", KEY, mode)
    path = tmp_path / "s.toml"
    path.write_text('[cluster]\nkey_file = "k"\n')
    if fine:
        assert load(path).cluster.load() is not None
    else:
        with pytest.raises(ConfigError, match="chmod 600"):
            load(path)


def test_what_a_renewal_leaves_for_a_moment_passes(tmp_path: Path, file: Path) -> None:
    """A file that is being replaced, and a key that is no longer the certificate's."""
    one, two = (make_certificates(tmp_path / name) for name in ("one", "two"))
    for key in ("nowhere.pem", two.key):
        file.write_text(f'[etcd]\ncert = "{one.cert}"\nkey = "{key}"\n')
        with pytest.raises(NotNow, match=r"\[etcd\]"):
            load(file)


def test_a_state_directory_remembers_it(tmp_path: Path, file: Path) -> None:
    recorded(tmp_path, security=str(file))
    assert ClusterRef.resolve(state_dir=tmp_path).security == load(file)
    own = tmp_path / "other.toml"
    own.write_text("")
    assert ClusterRef.resolve(state_dir=tmp_path, security=own).security.path == str(own)


@pytest.mark.parametrize("name", ["nats", "etcd"])
def test_a_login_for_a_server_that_up_starts_itself_is_a_mistake(tmp_path: Path, name: str) -> None:
    secret(tmp_path / "p", PASSWORD)
    path = tmp_path / "s.toml"
    path.write_text(f'[{name}]\nuser = "u"\npassword_file = "p"\n')
    options = plan.UpOptions(frontends=0, security=load(path))
    with pytest.raises(ConfigError, match=f"name it with --{name} URL"):
        plan.check(options)


@pytest.mark.parametrize(
    ("role", "host", "keyed", "warned"),
    [
        ("decode", "127.0.0.1", False, False),
        ("decode", "::1", False, False),
        ("decode", "0.0.0.0", False, True),
        ("frontend", "0.0.0.0", False, True),
        ("decode", "0.0.0.0", True, False),
        ("frontend", "::", True, False),
        ("prefill", "10.0.0.1", False, True),
    ],
)
def test_beyond_loopback_without_keys_there_is_a_warning(
    file: Path, role: str, host: str, keyed: bool, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run_role.warn_if_exposed(role, host, load(file) if keyed else OPEN)
    said = capsys.readouterr().err
    assert ("docs/operations.md" in said) is warned


def test_every_key_of_the_file_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    sections = {field.name: field.type for field in msgspec.structs.fields(Security)}
    del sections["path"]
    for name, section in sections.items():
        _, begin, item = text.partition(f"\n- `[{name}]`")
        assert begin, name
        item = re.split(r"\n(?:- |\n)", item)[0]
        missing = [key for key in section.__struct_fields__ if f"`{key}`" not in item]
        assert missing == []
