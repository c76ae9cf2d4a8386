"""The server's side of TLS: contexts from the settings, and when the certificate expires.

The files are PEM or PKCS#12 (config/security/certificates.py). Only a broker with TLS pays for the
import of `cryptography`.
"""

import ssl
from dataclasses import dataclass
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


class TlsError(Exception):
    """The certificates cannot be used. The text names files, never secrets."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The contexts for new connections, and their certificate."""

    context: ssl.SSLContext  # of SSL listeners
    # Asks clients for no certificate: of HTTP and, as in Kafka, of SASL_SSL listeners.
    password_context: ssl.SSLContext
    chain: str  # as PEM
    expires_at: float  # seconds since 1970; that of the first certificate of the chain


def load_server_tls(settings: TlsSettings) -> ServerTls | None:
    """Read the certificates; return None if none is configured. Raises TlsError."""
    path = settings.certificate_file
    if path is None:
        return None
    from cryptography import x509

    try:
        certificates = _read_certificates(path, settings)
        certificate = x509.load_pem_x509_certificate(certificates.chain.encode())
        return ServerTls(
            context=_make_context(settings, certificates, settings.client_auth),
            password_context=_make_context(settings, certificates, "none"),
            chain=certificates.chain,
            expires_at=certificate.not_valid_after_utc.timestamp(),
        )
    except SecretError as error:
        raise TlsError(f"tls.key_password: {error}") from None
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        paths = ", ".join(filter(None, (path, settings.key_file, settings.ca_file)))
        raise TlsError(
            f"cannot load the certificates of {paths}: {describe_error(error)}"
        ) from None


def _read_certificates(path: str, settings: TlsSettings) -> Certificates:
    password = settings.key_password.read() if settings.key_password else None
    certificates = parse_certificates(read_file(path), password)
    if settings.key_file is not None:
        key = parse_certificates(read_file(settings.key_file), password).key
        certificates = Certificates(certificates.chain, key)
    if not (certificates.chain and certificates.key):
        raise ValueError("expected a certificate and its key")
    return certificates


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
        context.load_verify_locations(cadata=read_file(settings.ca_file).decode("ascii"))
    load_into(context, certificates)
    return context
