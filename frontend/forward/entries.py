"""How stock servers are named: ROLE=URL[@KV].

`prefill=http://10.0.0.1:8100@10.0.0.1:8998,decode=http://10.0.0.2:8200`. In a file one line each,
with blanks instead of `=` and `@`, and comments after `#`. In heartbeats a map: see `of_heartbeat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pullfill.errors import ConfigError

ROLES = ("prefill", "decode")
_SHORT = {"p": "prefill", "d": "decode", "producer": "prefill", "consumer": "decode"}
FORM = "give ROLE=URL[@KV], e.g. prefill=http://10.0.0.1:8100@10.0.0.1:8998"
MAX_KV = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """One server. kv: its KV address, in the form of its connector. Empty: none is needed."""

    role: str
    url: str
    kv: str = ""


def parse_list(text: str) -> tuple[Entry, ...]:
    """Return the servers of `ROLE=URL[@KV],…`. Raises ConfigError."""
    found = []
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        role, equals, rest = part.partition("=")
        url, _, kv = rest.partition("@")
        if not equals:
            raise ConfigError(f"cannot read the server {part!r}: {FORM}")
        found.append(make(role, url, kv))
    return tuple(dict.fromkeys(found))


def parse_file(text: str, name: str) -> tuple[Entry, ...]:
    """Return the servers of a file's text. Raises ConfigError, with the line's number."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if len(words) not in (2, 3):
                raise ConfigError("give ROLE URL [KV], e.g. decode http://10.0.0.2:8200")
            found.append(make(*words))
        except ConfigError as exc:
            raise ConfigError(f"{name}, line {number}: {exc}") from None
    return tuple(dict.fromkeys(found))


def of_heartbeat(message: object) -> Entry:
    """Return the server that a heartbeat names. Raises ConfigError.

    It is what vLLM's own connectors send: `type` (`P` or `D`), `http_address` (HOST:PORT) and
    `zmq_address`, the KV address. Names of pullfill: `role`, `url`, `kv_address`. More is ignored.
    """
    if not isinstance(message, Mapping):
        raise ConfigError("a heartbeat is a map with type, http_address and kv_address")
    role = _word(message, "type", "role")
    url = _word(message, "http_address", "url")
    return make(role, url, _word(message, "kv_address", "zmq_address"))


def _word(message: Mapping[Any, Any], *names: str) -> str:
    for name in names:
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def make(role: str, url: str, kv: str = "") -> Entry:
    """Return a checked entry. Raises ConfigError."""
    role = role.strip().lower()
    role = _SHORT.get(role, role)
    if role not in ROLES:
        raise ConfigError(f"no role is called {role!r}: use prefill or decode")
    url = url.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good, parts = False, urlsplit("")
    if not good or parts.query or parts.fragment or parts.username or not url.isprintable():
        raise ConfigError(f"{url!r} is no address of a server: give http://HOST:PORT")
    kv = kv.strip()
    if len(kv) > MAX_KV or not kv.isascii() or not kv.isprintable() or " " in kv:
        raise ConfigError(f"{kv[:40]!r} is no KV address: give HOST:PORT")
    return Entry(role, url, kv)
