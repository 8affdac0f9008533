"""How stock servers are named: ROLE=URL[@KV].

For example `prefill=http://10.0.0.1:8100@10.0.0.1:8998,decode=http://10.0.0.2:8200`. A file has the
same three values (`server_file`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from pullfill import redact
from pullfill.errors import ConfigError

ROLES = ("prefill", "decode")
_SHORT = {"p": "prefill", "d": "decode", "producer": "prefill", "consumer": "decode"}
FORM = (
    "give ROLE=URL[@KV], e.g. prefill=10.0.0.1:8100@10.0.0.1:8998. KV addresses with commas need "
    "--servers-file"
)
MAX_KV = 256
# After a colon comes a port. Anything else may be a password: "http://user:secret@host".
_NO_PORT = re.compile(r":(?!//|\d+(?:[/?@]|$)).*", re.S)


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
            raise ConfigError(f"cannot read the server {_shown(part)!r}: {FORM}")
        found.append(make(role, url, kv))
    return tuple(dict.fromkeys(found))


def make(role: str, url: str, kv: str = "") -> Entry:
    """Return a checked entry. Raises ConfigError."""
    return Entry(role_of(role), url_of(url), kv_of(kv))


def role_of(role: str) -> str:
    """Return `prefill` or `decode`. Raises ConfigError."""
    role = role.strip().lower()
    role = _SHORT.get(role, role)
    if role not in ROLES:
        raise ConfigError(f"no role is called {_shown(role)!r}: use prefill or decode")
    return role


def url_of(url: str) -> str:
    """Return the URL of a server, without a slash at the end. Raises ConfigError."""
    url = url.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good, parts = False, urlsplit("")
    if not good or parts.query or parts.fragment or parts.username or not url.isprintable():
        raise ConfigError(f"{_shown(url)!r} is no address of a server: give http://HOST:PORT")
    return url


def kv_of(kv: str) -> str:
    """Return a KV address. Raises ConfigError."""
    kv = kv.strip()
    if len(kv) > MAX_KV or not kv.isascii() or not kv.isprintable() or " " in kv:
        raise ConfigError(f"{_shown(kv)!r} is no KV address: give HOST:PORT")
    return kv


def _shown(text: str) -> str:
    """Return what an error may repeat: the first 80 characters, without what may be a secret."""
    return redact.url(_NO_PORT.sub(":...", text))[:80]
