"""A test's own certificate authority and what it signs, in PEM files of a temporary directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """Paths. `cert`, `key`: for servers at 127.0.0.1 and for clients, without a common name: etcd
    with logins on refuses clients that have one. `other_ca` signed nothing."""

    ca: Path
    cert: Path
    key: Path
    other_ca: Path


def make_certificates(directory: Path) -> Certificates:
    directory.mkdir(parents=True, exist_ok=True)
    ca = trustme.CA()
    made = ca.issue_cert("127.0.0.1")
    paths = Certificates(*(directory / f"{n}.pem" for n in ("ca", "cert", "key", "other_ca")))
    ca.cert_pem.write_to_path(str(paths.ca))
    made.cert_chain_pems[0].write_to_path(str(paths.cert))
    paths.key.touch(0o600)
    made.private_key_pem.write_to_path(str(paths.key))
    trustme.CA().cert_pem.write_to_path(str(paths.other_ca))
    return paths
