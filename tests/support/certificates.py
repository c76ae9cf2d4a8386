"""Certificates for tests: an authority, and leaves that it signs."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


@dataclass
class Leaf:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def pem(self, password: str | None = None) -> bytes:
        encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
        return self.certificate.public_bytes(Encoding.PEM) + self.key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, encryption
        )

    def pkcs12(self, password: str) -> bytes:
        return pkcs12.serialize_key_and_certificates(
            b"leaf", self.key, self.certificate, None, BestAvailableEncryption(password.encode())
        )


class Authority:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(self.key, "test authority", is_authority=True)
        self.path = str(folder / "ca.pem")
        Path(self.path).write_bytes(self.certificate.public_bytes(Encoding.PEM))

    def leaf(self, common_name: str, days: int = 30) -> Leaf:
        key = ec.generate_private_key(ec.SECP256R1())
        return Leaf(key, self._sign(key, common_name, days=days))

    def write(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)

    def _sign(
        self,
        key: ec.EllipticCurvePrivateKey,
        common_name: str,
        *,
        days: int = 30,
        is_authority: bool = False,
    ) -> x509.Certificate:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return (
            x509.CertificateBuilder()
            .subject_name(_name(common_name))
            .issuer_name(_name("test authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - datetime.timedelta(days=2))
            .not_valid_after(NOW + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self.key, hashes.SHA256())
        )
