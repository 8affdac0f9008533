"""A test's own certificate authority and what it signs, in PEM files of a temporary directory."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Certificates:
    """Paths. `cert`, `key`: for servers at 127.0.0.1 and for clients, without a common name: etcd
    with logins on refuses clients that have one. `other_ca` signed nothing."""

    ca: Path
    cert: Path
    key: Path
    other_ca: Path


def make_certificates(directory: Path) -> Certificates:
    """Valid for an hour."""
    directory.mkdir(parents=True, exist_ok=True)
    ca_key, other_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca = _certificate("test ca", ca_key, "test ca", ca_key, authority=True)
    other = _certificate("other ca", other_key, "other ca", other_key, authority=True)
    cert = _certificate("", key, "test ca", ca_key, authority=False)
    paths = Certificates(*(directory / f"{n}.pem" for n in ("ca", "cert", "key", "other_ca")))
    for path, what in ((paths.ca, ca), (paths.cert, cert), (paths.other_ca, other)):
        path.write_bytes(what.public_bytes(serialization.Encoding.PEM))
    paths.key.touch(0o600)
    paths.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    authority: bool,
) -> x509.Certificate:
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=authority, crl_sign=authority,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if not authority:
        local = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(
            x509.SubjectAlternativeName([local]), critical=True
        ).add_extension(x509.ExtendedKeyUsage(both), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])
