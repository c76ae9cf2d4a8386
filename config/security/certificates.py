"""Certificates and keys in files: PEM or PKCS#12, for servers and clients.

Python's ssl loads a certificate with its key from files only, so text is passed on in an anonymous
file in memory. Only PKCS#12 files and encrypted keys need the import of `cryptography`.
"""

import os
import ssl
import tempfile
from dataclasses import dataclass, field
from typing import Final

from config.security.small_file import read_small_file

FILE_BYTES_MAX: Final = 1 << 20
_PEM: Final = b"-----BEGIN "
_DER_SEQUENCE: Final = b"\x30"  # the first byte of PKCS#12
_JKS: Final = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")  # JKS and JCEKS


@dataclass(frozen=True, slots=True)
class Certificates:
    """The content of a PEM or PKCS#12 file, as PEM. `key` is not encrypted."""

    chain: str  # the certificate of the key first
    key: str | None = field(default=None, repr=False)


def read_file(path: str) -> bytes:
    """Return the content of a small file. Raises OSError, ValueError if it is too large."""
    data = read_small_file(path, FILE_BYTES_MAX)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"{path} is larger than {FILE_BYTES_MAX} bytes")
    return data


def parse_certificates(data: bytes, password: str | None = None) -> Certificates:
    """Read PEM or PKCS#12 with or without a key. Raises ValueError without repeating secrets."""
    if _PEM in data:
        return _parse_pem(data, password)
    if data.startswith(_JKS):
        raise ValueError(
            "JKS is not supported; convert the file with "
            "`keytool -importkeystore -srckeystore FILE -destkeystore FILE.p12 "
            "-deststoretype PKCS12`"
        )
    if not data.startswith(_DER_SEQUENCE):
        raise ValueError("expected PEM or PKCS#12")
    return _parse_pkcs12(data, password)


def _parse_pem(data: bytes, password: str | None) -> Certificates:
    chain, key = [], None
    for block in data.split(_PEM)[1:]:
        label, _, rest = block.partition(b"-----")
        body, end, _ = rest.partition(b"-----END " + label + b"-----")
        if not end:
            raise ValueError(f"the PEM block {label.decode('ascii', 'replace')[:40]!r} has no end")
        text = b"%s%s-----%s-----END %s-----\n" % (_PEM, label, body, label)
        if label == b"CERTIFICATE":
            chain.append(text)
        elif label.endswith(b"PRIVATE KEY"):
            is_encrypted = label.startswith(b"ENCRYPTED") or b"Proc-Type: 4,ENCRYPTED" in body
            key = _decrypt(text, password) if is_encrypted else text
    return Certificates(b"".join(chain).decode("ascii"), key.decode("ascii") if key else None)


def _decrypt(pem: bytes, password: str | None) -> bytes:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if password is None:
        raise ValueError("the key is encrypted and no password is given")
    return _key_as_pem(load_pem_private_key(pem, password.encode()))


def _key_as_pem(key: object) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = key.private_bytes(  # type: ignore[attr-defined]  # of any kind of key
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    return pem


def _parse_pkcs12(data: bytes, password: str | None) -> Certificates:
    from cryptography.hazmat.primitives.serialization import Encoding, pkcs12

    key, certificate, others = pkcs12.load_key_and_certificates(
        data, None if password is None else password.encode()
    )
    chain = [certificate, *others] if certificate is not None else others
    pem = b"".join(part.public_bytes(Encoding.PEM) for part in chain)
    return Certificates(pem.decode(), _key_as_pem(key).decode() if key is not None else None)


def load_into(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Make a context present these certificates. Raises ssl.SSLError, OSError."""
    assert certificates.key is not None
    data = (certificates.key + certificates.chain).encode()
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("varve-certificate", os.MFD_CLOEXEC)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        return
    with tempfile.NamedTemporaryFile() as temporary:  # mode 0600
        temporary.write(data)
        temporary.flush()
        context.load_cert_chain(temporary.name)


def describe_error(error: Exception) -> str:
    """Return the reason of an error of ssl, cryptography or a file in one line."""
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__
