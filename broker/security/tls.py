"""The server's side of TLS: contexts from the settings, and when the certificate expires.

The files are PEM or PKCS#12 (config/security/certificates.py). Only a broker with TLS pays for the
import of `cryptography`.
"""

import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from config.security.certificates import (
    Certificates,
    describe_error,
    load_into,
    parse_certificates,
    read_file,
)
from config.security.secrets import SecretError
from config.settings import TlsSettings

_CLIENT_AUTH: Final = {
    "none": ssl.CERT_NONE,
    "requested": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
# The only group of the key exchange. OpenSSL's defaults contain finite-field groups, with which one
# ClientHello costs 0.2 s. RFC 8446 requires every client to know this one (docs/decisions/0032).
KEY_EXCHANGE_GROUP: Final = "prime256v1"
FLIGHTS_MAX: Final = 10  # of a handshake; TLS 1.2 needs two of each side


class TlsError(Exception):
    """The certificates cannot be used. The text names files, never secrets."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The contexts for new connections, and their certificate."""

    context: ssl.SSLContext  # of SSL listeners
    # Asks clients for no certificate: of HTTP and, as in Kafka, of SASL_SSL listeners.
    password_context: ssl.SSLContext
    chain: str  # as PEM
    # Of the first certificate of the chain, in seconds since 1970.
    begins_at: float
    expires_at: float

    def is_valid_at(self, seconds: float) -> bool:
        """Return whether clients accept the certificate at this time."""
        return self.begins_at <= seconds <= self.expires_at


def check_renewal(present: ServerTls | None, new: ServerTls | None, now_seconds: float) -> None:
    """Refuse a certificate that is not valid now in place of one that is. Raises TlsError."""
    if present is None or new is None or not present.is_valid_at(now_seconds):
        return
    if not new.is_valid_at(now_seconds):
        first, last = (
            datetime.fromtimestamp(seconds, UTC).isoformat()
            for seconds in (new.begins_at, new.expires_at)
        )
        raise TlsError(f"the new certificate is valid from {first} to {last} only")


def load_server_tls(settings: TlsSettings) -> ServerTls | None:
    """Read the certificates; return None if none is configured. Raises TlsError.

    A client of ours must be able to connect with them: OpenSSL accepts chains of 100 KB.
    """
    path = settings.certificate_file
    if path is None:
        return None
    from cryptography import x509

    try:
        certificates = _read_certificates(path, settings)
        certificate = x509.load_pem_x509_certificate(certificates.chain.encode())
        password_context = _make_context(settings, certificates, "none")
        _shake_hands(password_context)
        return ServerTls(
            context=_make_context(settings, certificates, settings.client_auth),
            password_context=password_context,
            chain=certificates.chain,
            begins_at=certificate.not_valid_before_utc.timestamp(),
            expires_at=certificate.not_valid_after_utc.timestamp(),
        )
    except SecretError as error:
        raise TlsError(f"tls.key_password: {error}") from None
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        paths = ", ".join(filter(None, (path, settings.key_file, settings.ca_file)))
        raise TlsError(
            f"cannot load the certificates of {paths}: {describe_error(error)}"
        ) from None


def _read(setting: str, path: str) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise TlsError(f"tls.{setting}: {path}: {describe_error(error)}") from None


def _read_certificates(path: str, settings: TlsSettings) -> Certificates:
    password = settings.key_password.read() if settings.key_password else None
    certificates = parse_certificates(_read("certificate_file", path), password)
    if settings.key_file is not None:
        key = parse_certificates(_read("key_file", settings.key_file), password).key
        certificates = Certificates(certificates.chain, key)
    if not (certificates.chain and certificates.key):
        raise ValueError("expected a certificate and its key")
    return certificates


def _shake_hands(context: ssl.SSLContext) -> None:
    """Connect to the context in memory, without a look at its certificate. Raises ssl.SSLError."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    for _ in range(FLIGHTS_MAX):
        for end in tuple(waiting):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
                waiting.remove(end)
    if waiting:
        raise ssl.SSLError("a handshake with this certificate does not end")


def _make_context(
    settings: TlsSettings, certificates: Certificates, client_auth: str
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    is_newest_only = settings.min_version == "TLSv1.3"
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if is_newest_only else ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_ecdh_curve(KEY_EXCHANGE_GROUP)
    context.verify_mode = _CLIENT_AUTH[client_auth]
    if settings.ca_file is not None and client_auth != "none":
        context.load_verify_locations(cadata=_read("ca_file", settings.ca_file).decode("ascii"))
    load_into(context, certificates)
    return context
