"""What etcd's JSON gateway says when it refuses a call or ends a stream."""

from __future__ import annotations

from typing import Any

import msgspec

from pullfill.errors import RegistryUnavailable

# Codes of gRPC.
_DEADLINE, _NOT_FOUND, _EXHAUSTED, _OUT_OF_RANGE = 4, 5, 8, 11
_UNAVAILABLE, _UNAUTHENTICATED = 14, 16
_PASSING = frozenset({_DEADLINE, _EXHAUSTED, _UNAVAILABLE, _UNAUTHENTICATED})
_OLD_AUTH = "revision of auth store is old"
"""Said of a token from before a change of users or roles. Its code is that of a bad request."""


class LeaseNotFound(RegistryUnavailable):
    """etcd does not know the lease."""


class RevisionLost(RegistryUnavailable):
    """The revision was compacted, or the store was made anew since."""


class Failure(msgspec.Struct):
    """An error of the gateway, of a call or inside a stream."""

    error: Any = None
    code: int = 0
    message: str = ""
    grpc_code: int = 0

    @property
    def text(self) -> str:
        """For people. Empty: it says nothing."""
        return self.message or str(self.error or "")

    @property
    def wants_token(self) -> bool:
        """Whether a new token may help."""
        return self._code == _UNAUTHENTICATED or _OLD_AUTH in self.text

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self._code in _PASSING or _OLD_AUTH in self.text

    @property
    def of_all(self) -> bool:
        """Whether each member of etcd would refuse this: it has no space, or the token is old."""
        return self._code == _EXHAUSTED or self.wants_token

    @property
    def of_lease(self) -> bool:
        """Whether the lease is unknown."""
        return self._code == _NOT_FOUND and "lease" in self.text

    @property
    def of_revision(self) -> bool:
        """Whether the revision is gone."""
        return self._code == _OUT_OF_RANGE

    @property
    def _code(self) -> int:
        return self.code or self.grpc_code


def read_failure(body: bytes) -> Failure:
    try:
        return msgspec.json.decode(body, type=Failure, strict=False)
    except (msgspec.MsgspecError, ValueError):
        return Failure(message=body[:200].decode("utf-8", "replace").strip())
