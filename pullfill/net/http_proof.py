"""How one asks a frontend that etcd names, without showing it a key.

Whoever may write to etcd can announce a frontend, and would collect the keys that are sent there.
So a question to such an address carries a proof instead of the key: an HMAC of its path and of the
time, made with a digest of the key. A frontend that has the key makes the same HMAC.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

# Good for one path, for reading, and for VALID_S seconds. Whoever gets it can repeat that question
# meanwhile, and cannot find a key of 16 random characters from it.
HEADER = "x-pullfill-proof"
# How far the clocks of both machines may be apart, the way there included. As in Kerberos: hosts
# without time synchronisation are often minutes apart, seldom more than five.
VALID_S = 300


def digest(key: bytes) -> bytes:
    """Return the 32 bytes by which a frontend knows a key."""
    return hashlib.blake2b(key, digest_size=32).digest()


def proof(key: bytes, path: str, now: float) -> str:
    """Return the value of HEADER.

    path: of the route, without quoting and without a root path.
    now: seconds since 1970."""
    at = int(now)
    return f"{at} {_hmac(digest(key), path, at)}"


def proven(shown: bytes, path: str, digests: Iterable[bytes], now: float) -> bool:
    """Whether `shown`, the value of HEADER, is a proof of one of the keys for `path`."""
    at, _, given = shown.partition(b" ")
    if not at.isdigit() or len(at) > 12 or abs(now - int(at)) > VALID_S:
        return False
    found = False
    for known in digests:
        found |= hmac.compare_digest(given, _hmac(known, path, int(at)).encode())
    return found


def _hmac(digested: bytes, path: str, at: int) -> str:
    text = f"pullfill question\n{at}\n{path}".encode("utf-8", "surrogatepass")
    return hmac.digest(digested, text, "sha256").hex()
