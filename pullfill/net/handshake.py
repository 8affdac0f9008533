"""How both ends of a connection prove that they hold the cluster key. No I/O.

    prefill worker (Introduction)            decode worker (Acceptance)
    AuthHello      its nonce           →
                                       ←     AuthChallenge    its nonce, its proof
    AuthProof      its proof           →
    every frame from here on carries a seal, in both directions

The control channel (`channel.py`) and the KV port (`stream/kv_protocol.py`) drive it. A proof
covers both nonces, the prover's role and the purpose of the connection. A seal covers the frame and
its number, with a key for each direction. So nobody on the path can forge, change, repeat, drop or
reflect a frame. Frames are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from pullfill.errors import AuthFailed
from pullfill.net.security import ClusterKey
from pullfill.wire import AuthChallenge, AuthHello, AuthProof

CONTROL = "control channel"
KV_PORT = "kv port"


class Seal:
    """One direction's key and count of frames."""

    __slots__ = ("_key", "_number")
    BYTES = 16

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def add(self, body: bytes) -> bytes:
        """Return the next frame: the seal and `body`."""
        return self.of_next(body) + body

    def remove(self, frame: bytes) -> bytes:
        """Return the body of the next frame. Raises AuthFailed."""
        seal, body = frame[: self.BYTES], frame[self.BYTES :]
        if not hmac.compare_digest(seal, self.of_next(body)):
            raise AuthFailed("a frame has a wrong seal: forged or replayed")
        return body

    def of_next(self, body: bytes) -> bytes:
        """Return the seal of the next frame."""
        hashed = hashlib.blake2b(
            self._number.to_bytes(8, "little"), key=self._key, digest_size=self.BYTES
        )
        self._number += 1
        hashed.update(body)
        return hashed.digest()


class _Proofs:
    """What both ends compute from the key and the two nonces."""

    def __init__(self, key: ClusterKey, purpose: str, prefill: bytes, decode: bytes) -> None:
        self._key = key.derive(purpose)
        self._nonces = prefill + decode

    def of(self, label: str) -> bytes:
        """label: `proof of ROLE`, or `seal of ROLE` for the key that seals what it sends."""
        text = f"{label}:".encode() + self._nonces
        return hashlib.blake2b(text, key=self._key, digest_size=32).digest()


class Introduction:
    """The prefill worker's end. hello: the first message."""

    def __init__(self, key: ClusterKey, purpose: str) -> None:
        self._key, self._purpose = key, purpose
        self.hello = AuthHello(nonce=secrets.token_bytes(32))

    def answer(self, challenge: AuthChallenge) -> tuple[AuthProof, bytes, bytes]:
        """Return the last message, and the keys that seal incoming and outgoing frames after it.

        Raises AuthFailed."""
        proofs = _Proofs(self._key, self._purpose, self.hello.nonce, challenge.nonce)
        if not hmac.compare_digest(challenge.proof, proofs.of("proof of decode")):
            raise AuthFailed(
                f"the decode worker has another cluster key than ours ({self._key.fingerprint}): "
                "check [cluster] key_file on both"
            )
        last = AuthProof(proof=proofs.of("proof of prefill"))
        return last, proofs.of("seal of decode"), proofs.of("seal of prefill")


class Acceptance:
    """The decode worker's end. key: None lets in everybody who shows no key."""

    def __init__(self, key: ClusterKey | None, purpose: str) -> None:
        self._key, self._purpose = key, purpose
        self._proofs: _Proofs

    def challenge(self, first: object) -> AuthChallenge | None:
        """Return the answer to the peer's first message. None: no proof is needed.

        Raises AuthFailed. Its text may be told to the peer."""
        if self._key is None:
            if not isinstance(first, AuthHello):
                return None
            raise AuthFailed(
                "the decode worker has no cluster key: set [cluster] key_file there too"
            )
        if not isinstance(first, AuthHello):
            raise AuthFailed(
                "the prefill worker shows no cluster key: it needs our [cluster] key_file "
                f"({self._key.fingerprint})"
            )
        nonce = secrets.token_bytes(32)
        self._proofs = _Proofs(self._key, self._purpose, first.nonce, nonce)
        return AuthChallenge(nonce=nonce, proof=self._proofs.of("proof of decode"))

    def check(self, said: AuthProof) -> tuple[bytes, bytes]:
        """Return the keys that seal incoming and outgoing frames. Raises as `challenge`."""
        assert self._key is not None
        if not hmac.compare_digest(said.proof, self._proofs.of("proof of prefill")):
            raise AuthFailed(
                f"the prefill worker has another cluster key than ours ({self._key.fingerprint}): "
                "check its [cluster] key_file"
            )
        return self._proofs.of("seal of prefill"), self._proofs.of("seal of decode")
