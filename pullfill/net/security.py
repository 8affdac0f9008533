"""The file of credentials and keys: logins at NATS and etcd, the cluster key, HTTP keys.

`load` reads the TOML file that `--security FILE` or `PULLFILL_SECURITY` names. docs/operations.md
lists its keys. The file holds paths, not secrets, so a `Security` can be printed and compared.
Secrets are read from their files where they are used. They are never logged, nor put on a command
line or into etcd. Without a file everything is off, which is right for one machine on loopback.
"""

from __future__ import annotations

import base64
import hashlib
import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pullfill.errors import ConfigError, NotNow

SECURITY_ENV = "PULLFILL_SECURITY"
MIN_KEY_BYTES = 32
MAX_SECRET_BYTES = 64 << 10
_NATS_JWT = "NATS USER JWT"
_NATS_SEED = "USER NKEY SEED"


# Keys whose files others may read. All other files hold secrets.
_PUBLIC = frozenset({"ca", "cert"})


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One section. All fields but `user` are paths."""

    def _checked(self, name: str, base: Path) -> Any:
        """Return it with absolute paths. Raises ConfigError unless each file can be read."""
        changes = {}
        for key in self.__struct_fields__:
            value = getattr(self, key)
            if value is None or key == "user":
                continue
            path = base / Path(value).expanduser()
            try:
                _read(path, private=key not in _PUBLIC)
            except ConfigError as exc:
                raise type(exc)(f"[{name}] {key}: {exc}") from None
            changes[key] = str(path)
        checked = msgspec.structs.replace(self, **changes)
        checked._check(name)
        return checked

    def _check(self, name: str) -> None:
        """Check which fields go together, and what their files hold. Raises ConfigError."""


class ServerSecurity(_Section, frozen=True, kw_only=True):
    """A server that we log in to. `[etcd]` has these keys only.

    ca: who signed the server's certificate.
    cert, key: ours, for mutual TLS."""

    user: str | None = None
    password_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def _check(self, name: str) -> None:
        if (self.user is None) != (self.password_file is None):
            raise ConfigError(f"[{name}] needs both user and password_file, or neither")
        if (self.cert is None) != (self.key is None):
            raise ConfigError(f"[{name}] needs both cert and key, or neither")
        self.login()
        self.tls(name)

    def login(self) -> tuple[str, str] | None:
        """Read and return (user, password). None: the file names none. Raises ConfigError."""
        if self.user is None or self.password_file is None:
            return None
        return self.user, _text(self.password_file)

    def tls(self, name: str = "tls") -> ssl.SSLContext | None:
        """Return a context that verifies the server and its name. None: plain, or the system's CAs.

        Raises ConfigError for files that are no PEM."""
        if self.ca is None and self.cert is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ValueError) as exc:
            # While they are renewed, one may be half written, or cert and key be no pair.
            raise NotNow(f"[{name}] ca, cert or key is no usable PEM file: {exc}") from None
        return context


class NatsSecurity(ServerSecurity, frozen=True, kw_only=True):
    """`[nats]`. At most one of credentials, user, token_file."""

    credentials: str | None = None
    token_file: str | None = None

    def _check(self, name: str) -> None:
        super()._check(name)
        if sum(v is not None for v in (self.credentials, self.user, self.token_file)) > 1:
            raise ConfigError(f"[{name}] takes one of credentials, user, token_file, not several")
        self.options()

    def options(self) -> dict[str, Any]:
        """Return options of `nats.connect`. Reads the secrets. Raises ConfigError."""
        options: dict[str, Any] = {}
        if (context := self.tls("nats")) is not None:
            options["tls"] = context
        if (login := self.login()) is not None:
            options["user"], options["password"] = login
        if self.token_file is not None:
            options["token"] = _text(self.token_file)
        if self.credentials is not None:
            jwt, sign = _nats_credentials(self.credentials)
            options["user_jwt_cb"] = lambda: bytearray(jwt.encode())
            options["signature_cb"] = sign
        return options


class ClusterSecurity(_Section, frozen=True, kw_only=True):
    """`[cluster]`: the secret that frontends, decode and prefill workers share."""

    key_file: str | None = None

    def _check(self, name: str) -> None:
        self.load()

    def load(self) -> ClusterKey | None:
        """Read and return the key. None: the file names none. Raises ConfigError."""
        if self.key_file is None:
            return None
        secret = _read(Path(self.key_file), private=True).strip()
        if len(secret) < MIN_KEY_BYTES:
            raise ConfigError(
                f"[cluster] key_file: {self.key_file} holds {len(secret)} bytes, at least "
                f"{MIN_KEY_BYTES} are needed: make one with `openssl rand -hex 32 > FILE`"
            )
        return ClusterKey(secret)


class FrontendSecurity(_Section, frozen=True, kw_only=True):
    """`[frontend]`: what HTTP clients must show. One key per line. Each of them is accepted.

    stock_key_file: the one key that stock vLLM servers want from us."""

    api_key_file: str | None = None
    admin_key_file: str | None = None
    stock_key_file: str | None = None

    def _check(self, name: str) -> None:
        self.api_keys()
        self.admin_keys()
        self.stock_key()

    def key_files(self) -> list[str]:
        """Return the files of the keys that clients must show."""
        return [path for path in (self.api_key_file, self.admin_key_file) if path is not None]

    def api_keys(self) -> tuple[str, ...]:
        """Read and return the keys for the API. Raises ConfigError."""
        return _keys("api_key_file", self.api_key_file)

    def admin_keys(self) -> tuple[str, ...]:
        """Read and return the keys of administrators. Raises ConfigError."""
        return _keys("admin_key_file", self.admin_key_file)

    def stock_key(self) -> str:
        """Read and return the key of stock vLLM servers. Empty: none. Raises ConfigError."""
        return "" if self.stock_key_file is None else _text(self.stock_key_file)


class Security(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. path: where it was read from. Empty: there is none."""

    nats: NatsSecurity = NatsSecurity()
    etcd: ServerSecurity = ServerSecurity()
    cluster: ClusterSecurity = ClusterSecurity()
    frontend: FrontendSecurity = FrontendSecurity()
    path: str = ""


# Everything off.
OPEN = Security()


def load(path: str | os.PathLike[str] | None) -> Security:
    """Read and check the file and everything it names. Without a path everything is off.

    Relative paths in the file start at its directory. Raises ConfigError, one line that says what
    to do. A secret is never part of it."""
    if not path:
        return OPEN
    file = Path(path).expanduser().absolute()
    data = _read(file, private=False)
    try:
        found = msgspec.toml.decode(data, type=Security)
        if found.path:  # ours, not the file's
            raise msgspec.ValidationError("Object contains unknown field `path`")
        sections = {
            name: getattr(found, name)._checked(name, file.parent)
            for name in found.__struct_fields__
            if name != "path"
        }
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{file}: {exc}; docs/operations.md lists what may stand there") from None
    except ConfigError as exc:
        raise type(exc)(f"{file}: {exc}") from None
    return Security(path=str(file), **sections)


class ClusterKey:
    """A shared secret that never leaves its process. Only keys derived from it are used.

    fingerprint: 8 hex digits that people can compare. They tell nothing about the secret."""

    __slots__ = ("_master", "fingerprint")

    def __init__(self, secret: bytes) -> None:
        self._master = hashlib.blake2b(secret, digest_size=64, person=b"pullfill cluster").digest()
        self.fingerprint = self.derive("fingerprint")[:4].hex()

    def derive(self, label: str) -> bytes:
        """Return 32 bytes for one purpose. Another label gives unrelated ones."""
        return hashlib.blake2b(label.encode(), key=self._master, digest_size=32).digest()

    def __repr__(self) -> str:
        return f"ClusterKey({self.fingerprint})"


# --------------------------------------------------------------------------- files


def _read(path: Path, *, private: bool) -> bytes:
    """Return the file's bytes. Raises ConfigError.

    private: the file must belong to us or root, and be closed to others."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise NotNow(f"cannot read {path}: {exc.strerror}") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise ConfigError(f"{path} is not a regular file")
    with open(fd, "rb") as file:
        if private and info.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{path} belongs to another user: chown it to the one that runs this")
        if private and info.st_mode & 0o027:  # a group may read: secrets mounted with an fsGroup
            raise ConfigError(f"{path} is open to others: chmod 600 {path}")
        data = file.read(MAX_SECRET_BYTES + 1)
    if len(data) > MAX_SECRET_BYTES and (private or path.suffix == ".toml"):
        raise ConfigError(f"{path} is larger than {MAX_SECRET_BYTES >> 10} KiB: the wrong file?")
    return data


def _text(path: str) -> str:
    """Return the secret in a file of one line. Raises ConfigError."""
    try:
        text = _read(Path(path), private=True).decode().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text") from None
    if not text or not text.isprintable():
        raise ConfigError(f"{path} must hold one line of text")
    return text


def _keys(name: str, path: str | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = _read(Path(path), private=True).decode("ascii").split()
    except UnicodeDecodeError:
        raise ConfigError(f"[frontend] {name}: {path} must hold ASCII, one key per line") from None
    if not lines or min(map(len, lines)) < 16:
        raise ConfigError(
            f"[frontend] {name}: {path} must hold keys of 16 characters or more, one per line: "
            "make one with `openssl rand -hex 32 > FILE`"
        )
    return tuple(lines)


def _nats_credentials(path: str) -> tuple[str, Callable[[str], bytes]]:
    """Return the JWT of a NATS .creds file, and what signs a nonce. Raises ConfigError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        text = _read(Path(path), private=True).decode("ascii")
        jwt, seed = _block(text, _NATS_JWT), _block(text, _NATS_SEED)
        # An NKEY seed: 2 bytes of kind, 32 of key, 2 of checksum, in base32 without padding.
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
        if len(raw) != 36:
            raise ValueError("the seed has another length")
        key = Ed25519PrivateKey.from_private_bytes(raw[2:34])
    except (ValueError, UnicodeDecodeError):
        raise ConfigError(
            f"[nats] credentials: {path} is no NATS .creds file (`nsc generate creds` makes one)"
        ) from None
    return jwt, lambda nonce: base64.b64encode(key.sign(nonce.encode()))


def _block(text: str, title: str) -> str:
    """Return the line below `-----BEGIN title-----`. Raises ValueError."""
    _, found, rest = text.partition(f"BEGIN {title}")
    lines = [line.strip() for line in rest.splitlines()[1:] if line.strip()]
    if not found or not lines:
        raise ValueError(f"no {title}")
    return lines[0]
