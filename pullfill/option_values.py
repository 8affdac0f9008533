"""Reads values of flags (`pullfill/options.py`). Each function raises ConfigError for a bad one."""

from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_network
from urllib.parse import urlsplit

from pullfill import redact
from pullfill.config import TRANSPORTS
from pullfill.errors import ConfigError


def parse_transports(text: str | None) -> frozenset[str] | None:
    """Return the transports that are named. None: whatever works. Raises ConfigError."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in TRANSPORTS]
    if wrong or not names:
        what = f"no transport is called {wrong[0]!r}" if wrong else "--transports names none"
        raise ConfigError(f"{what}: use one or more of {', '.join(TRANSPORTS)}")
    return frozenset(names)


def check_address(flag: str, address: str | None) -> str | None:
    """Return the address to publish as `tcp://HOST:PORT`. Raises ConfigError."""
    if address is None:
        return None
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "#" in host:
        raise ConfigError(f"{flag} {address!r}: give tcp://HOST:PORT")
    return f"tcp://{host}:{port}"


def parse_listen(flag: str, text: str | None) -> str | None:
    """Return `tcp://HOST:PORT` of `[HOST:]PORT`. HOST is loopback at first. Raises ConfigError."""
    if text is None or text.removeprefix("tcp://").rpartition(":")[0]:
        return check_address(flag, text)
    return check_address(flag, f"127.0.0.1:{text}")


Network = IPv4Network | IPv6Network


def parse_networks(text: str | None) -> tuple[Network, ...]:
    """Return the networks of `10.0.0.0/24,fd00::/64`. None: (). Raises ConfigError."""
    try:
        return tuple(ip_network(part.strip()) for part in text.split(",")) if text else ()
    except ValueError as exc:
        raise ConfigError(f"--heartbeats-from: {exc}; give networks, e.g. 10.0.0.0/24") from None


def check_url(flag: str, url: str | None) -> str | None:
    """Return the address to publish as `http[s]://HOST[:PORT]`. Raises ConfigError."""
    if url is None:
        return None
    with suppress(ValueError):
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or parts.username)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and plain:
            return url.rstrip("/")
    raise ConfigError(f"{flag} {redact.url(url)!r}: give http://HOST:PORT or https://HOST:PORT")


def parse_cores(text: str | None) -> tuple[int, ...]:
    """Return the core numbers of `3` or `0-3,8`. Raises ConfigError."""
    return parse_numbers("--cpu", text, "core numbers")


def parse_numbers(flag: str, text: str | None, what: str = "numbers") -> tuple[int, ...]:
    """Return the numbers of `3` or `0-3,8`, each once. None: (). Raises ConfigError."""
    found: list[int] = []
    for part in text.split(",") if text is not None else ():
        low, dash, high = part.strip().partition("-")
        try:
            first, last = int(low), int(high) if dash else int(low)
        except ValueError:
            first, last = 0, -1
        if last < first:
            raise ConfigError(f"{flag} {text!r}: give {what}, e.g. 1 or 0-3")
        found.extend(range(first, last + 1))
    return tuple(dict.fromkeys(found))
