"""How a client secures its connections: TLS and SASL, by the names of Kafka's clients.

A command reads them from a file in Kafka's properties format (`--command-config FILE`), the source
of Spark from its options. Both produce a `ClientSecurity` with certificates and passwords, not
paths, so that Spark executors need no files of the driver. Only the token of OAUTHBEARER stays a
path, because it expires: each connection reads the file again.

Rules: a setting of TLS or SASL that these clients cannot honour is an error, never ignored, and so
is a misspelt one. Other settings of Kafka's clients are ignored. Texts of errors and `repr` contain
no passwords, keys or tokens.
"""

import difflib
import json
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from config.address import Address, parse_protocol_address
from config.security.certificates import (
    Certificates,
    describe_error,
    load_into,
    parse_certificates,
    read_file,
)
from config.security.properties import parse_login_module, parse_properties
from config.security.secrets import SECRET_BYTES_MAX

PLAIN: Final = "PLAIN"
SCRAM: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
OAUTHBEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = (PLAIN, *SCRAM, OAUTHBEARER)
_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MODULES: Final = {
    PLAIN: "org.apache.kafka.common.security.plain.PlainLoginModule",
    **dict.fromkeys(SCRAM, "org.apache.kafka.common.security.scram.ScramLoginModule"),
    OAUTHBEARER: "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule",
}
_SUPPORTED: Final = frozenset((
    "sasl.jaas.config", "sasl.mechanism", "sasl.oauthbearer.token.endpoint.url",
    "ssl.enabled.protocols", "ssl.endpoint.identification.algorithm", "ssl.key.password",
    "ssl.keystore.certificate.chain", "ssl.keystore.key", "ssl.keystore.location",
    "ssl.keystore.password", "ssl.keystore.type", "ssl.truststore.certificates",
    "ssl.truststore.location", "ssl.truststore.password", "ssl.truststore.type",
))  # fmt: skip
# Settings of Java's implementation, which change neither trust nor identity.
_IGNORED: Final = (
    "sasl.login.callback.handler.class", "sasl.login.connect.timeout.ms",
    "sasl.login.read.timeout.ms", "sasl.login.refresh.", "sasl.login.retry.",
    "sasl.oauthbearer.", "sasl.kerberos.", "security.providers", "ssl.keymanager.algorithm",
    "ssl.protocol", "ssl.provider", "ssl.secure.random.implementation",
    "ssl.trustmanager.algorithm",
)  # fmt: skip
# Names of librdkafka, and what Kafka's clients call it.
_OF_LIBRDKAFKA: Final = {
    "sasl.mechanisms": "sasl.mechanism",
    "sasl.password": "sasl.jaas.config",
    "sasl.username": "sasl.jaas.config",
    "ssl.ca.location": "ssl.truststore.location",
    "ssl.ca.pem": "ssl.truststore.certificates",
    "ssl.certificate.location": "ssl.keystore.location",
    "ssl.certificate.pem": "ssl.keystore.certificate.chain",
    "ssl.key.location": "ssl.keystore.location",
    "ssl.key.pem": "ssl.keystore.key",
}
# How like a name of TLS or SASL another name has to be, to count as a mistake.
_SIMILARITY_MIN: Final = 0.9
# X509_V_ERR of OpenSSL: signed with another key of a CA of that name, self-signed (alone, in a
# chain), no issuer (in the store, of the first).
_UNKNOWN_ISSUER: Final = frozenset({7, 18, 19, 20, 21})
_STORE_TYPES: Final = ("JKS", "PKCS12", "PEM")


class ClientSecurityError(ValueError):
    """The settings cannot be used. The text names settings and files, never secrets."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS of a client. All certificates are PEM text."""

    authorities: str | None = None  # None: those of the operating system
    certificate: str | None = None  # with its chain
    key: str | None = field(default=None, repr=False)
    verifies_host: bool = True
    is_newest_only: bool = False  # TLS 1.3 only, otherwise also 1.2

    def context(self) -> ssl.SSLContext:
        """Return a context for connections. Raises ClientSecurityError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.verifies_host
        version = ssl.TLSVersion.TLSv1_3 if self.is_newest_only else ssl.TLSVersion.TLSv1_2
        context.minimum_version = version
        # A certificate in the trust store is trusted itself, as in Java, even if it is no CA.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            if self.authorities is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(cadata=self.authorities)
            if self.certificate is not None:
                load_into(context, Certificates(self.certificate, self.key))
        except (OSError, ValueError) as error:
            raise ClientSecurityError(
                f"the certificates cannot be used: {describe_error(error)}"
            ) from None
        return context

    @property
    def public_part(self) -> "ClientTls":
        """Return the same without the client's own certificate and key."""
        return ClientTls(self.authorities, None, None, self.verifies_host, self.is_newest_only)


@dataclass(frozen=True, slots=True)
class ClientSasl:
    """A mechanism with a user and password, or with the file of a token."""

    mechanism: str
    username: str = ""
    password: str = field(default="", repr=False)
    token_file: str | None = None

    def read_token(self) -> str:
        """Return the token of OAUTHBEARER. Raises ClientSecurityError."""
        assert self.token_file is not None
        try:
            token = read_file(self.token_file).decode("ascii").strip()
        except (OSError, ValueError) as error:
            raise ClientSecurityError(
                f"cannot read the token in {self.token_file}: {describe_error(error)}"
            ) from None
        if not token or not token.isprintable() or " " in token:
            raise ClientSecurityError(f"{self.token_file} does not contain one token")
        return token


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """The security protocol of Kafka connections, TLS and SASL.

    The HTTP API has a scheme instead of a protocol: it uses `tls` for https:// addresses, and the
    user or token of `sasl` whatever the protocol is.
    """

    protocol: str = "PLAINTEXT"
    tls: ClientTls = ClientTls()
    sasl: ClientSasl | None = None

    @property
    def kafka_tls(self) -> ClientTls | None:
        """Return TLS of Kafka connections, None without."""
        return self.tls if self.protocol.endswith("SSL") else None

    @property
    def kafka_sasl(self) -> ClientSasl | None:
        """Return SASL of Kafka connections, None without."""
        return self.sasl if self.protocol.startswith("SASL") else None

    def to_text(self) -> str:
        """Return everything, secrets too, for `from_text`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "ClientSecurity":
        """Return what `to_text` wrote."""
        document = json.loads(text)
        sasl = document["sasl"]
        return cls(
            document["protocol"],
            ClientTls(**document["tls"]),
            None if sasl is None else ClientSasl(**sasl),
        )


PLAINTEXT: Final = ClientSecurity()


@dataclass(frozen=True, slots=True)
class Cluster:
    """The bootstrap addresses of a Kafka cluster, HOST:PORT,..., and how to connect to it."""

    bootstrap: str
    security: ClientSecurity = PLAINTEXT

    def __post_init__(self) -> None:
        """Check the addresses. Raises ValueError."""
        if not self.addresses:
            raise ValueError("bootstrap.servers is empty")

    def __str__(self) -> str:
        return self.bootstrap

    @property
    def addresses(self) -> list[Address]:
        """Return the bootstrap addresses. As in Kafka, each may begin with the protocol."""
        addresses = []
        for part in filter(str.strip, self.bootstrap.split(",")):
            protocol, address = parse_protocol_address(part)
            if "://" in part and protocol != self.security.protocol:
                raise ValueError(
                    f"{part.strip()[:80]!r} does not fit security.protocol {self.security.protocol}"
                )
            addresses.append(address)
        return addresses


def read_command_config(path: str) -> ClientSecurity:
    """Read a file in Kafka's properties format. Raises ClientSecurityError."""
    try:
        text = read_file(path).decode()
    except (OSError, ValueError) as error:
        raise ClientSecurityError(f"{path}: {describe_error(error)}") from None
    try:
        return parse_client_security(parse_properties(text))
    except ClientSecurityError as error:
        raise ClientSecurityError(f"{path}: {error}") from None


def parse_client_security(settings: Mapping[str, str]) -> ClientSecurity:
    """Read the settings of TLS and SASL among a client's. Raises ClientSecurityError."""
    _check_names(settings)
    protocol = (settings.get("security.protocol") or "PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        raise ClientSecurityError(
            f"security.protocol is {protocol[:40]}, not one of {', '.join(_PROTOCOLS)}"
        )
    has_sasl = protocol.startswith("SASL") or "sasl.jaas.config" in settings
    return ClientSecurity(
        protocol, _parse_tls(settings), _parse_sasl(settings) if has_sasl else None
    )


def untrusted_text(address: object, error: ssl.SSLCertVerificationError) -> str:
    """Say why the certificate of a server is not trusted and, if that may help, what to set."""
    hint = ""
    if error.verify_code in _UNKNOWN_ISSUER:
        hint = "; name its CA in ssl.truststore.location of --command-config"
    return f"the certificate of {address} is not trusted: {error.verify_message}{hint}"


def is_security_setting(name: str) -> bool:
    """Return whether a client's setting belongs to TLS or SASL."""
    return name == "security.protocol" or name.startswith(("ssl.", "sasl."))


def _check_names(settings: Mapping[str, str]) -> None:
    known = ("security.protocol", *_SUPPORTED)
    for name in settings:
        if name in known or name.startswith(_IGNORED):
            continue
        if (of_kafka := _OF_LIBRDKAFKA.get(name)) is not None:
            raise ClientSecurityError(f"{name} is a name of librdkafka: use {of_kafka}")
        near = difflib.get_close_matches(name[:100].lower(), known, n=1, cutoff=_SIMILARITY_MIN)
        if near:
            raise ClientSecurityError(f"{name} is not supported; did you mean {near[0]}?")
        if name.lower().startswith(("ssl.", "sasl.", "security.")):
            raise ClientSecurityError(f"{name} is not supported")


def _parse_tls(settings: Mapping[str, str]) -> ClientTls:
    algorithm = settings.get("ssl.endpoint.identification.algorithm", "https").strip().lower()
    if algorithm not in ("https", ""):
        raise ClientSecurityError(
            "ssl.endpoint.identification.algorithm is neither https nor empty (no verification)"
        )
    versions = {
        version.strip()
        for version in settings.get("ssl.enabled.protocols", "TLSv1.2,TLSv1.3").split(",")
    }
    if not versions & {"TLSv1.2", "TLSv1.3"}:
        raise ClientSecurityError("ssl.enabled.protocols names neither TLSv1.2 nor TLSv1.3")
    trusted = _read_store(settings, "truststore", inline=("ssl.truststore.certificates",))
    own = _read_store(
        settings, "keystore", inline=("ssl.keystore.key", "ssl.keystore.certificate.chain")
    )
    if trusted is not None and not trusted.chain:
        raise ClientSecurityError("ssl.truststore contains no certificate")
    if own is not None and not (own.chain and own.key):
        raise ClientSecurityError("ssl.keystore needs a certificate and its key")
    tls = ClientTls(
        authorities=trusted.chain if trusted else None,
        certificate=own.chain if own else None,
        key=own.key if own else None,
        verifies_host=algorithm == "https",
        is_newest_only="TLSv1.2" not in versions,
    )
    tls.context()  # raises for certificates that OpenSSL cannot use
    return tls


def _read_store(
    settings: Mapping[str, str], kind: str, *, inline: tuple[str, ...]
) -> Certificates | None:
    """Return the certificates of a store: a file, or PEM text in the settings `inline`."""
    kind_of_file = settings.get(f"ssl.{kind}.type", "PEM").upper()
    if kind_of_file not in _STORE_TYPES:
        raise ClientSecurityError(
            f"ssl.{kind}.type is {kind_of_file[:40]}, not one of {', '.join(_STORE_TYPES)}"
        )
    path = settings.get(f"ssl.{kind}.location")
    text = "\n".join(settings[name] for name in inline if name in settings)
    if not path and not text:
        return None
    password = settings.get(f"ssl.{kind}.password")
    try:
        data = read_file(path) if path else text.encode()
        is_pem = b"-----BEGIN " in data
        if kind == "keystore" and is_pem:
            password = settings.get("ssl.key.password") or password
        return parse_certificates(data, password)
    except (OSError, ValueError) as error:
        name = f"ssl.{kind}.location {path}" if path else " and ".join(inline)
        raise ClientSecurityError(f"{name}: {describe_error(error)}") from None


def _parse_sasl(settings: Mapping[str, str]) -> ClientSasl:
    mechanism = settings.get("sasl.mechanism", "").upper()
    if mechanism not in MECHANISMS:
        raise ClientSecurityError(
            f"sasl.mechanism is {mechanism[:40] or 'missing'}; supported: {', '.join(MECHANISMS)}"
        )
    if mechanism == OAUTHBEARER:
        return ClientSasl(mechanism, token_file=_parse_token_file(settings))
    expected = _MODULES[mechanism]
    example = f'{expected} required username="..." password="...";'
    text = settings.get("sasl.jaas.config")
    if not text:
        raise ClientSecurityError(f"sasl.jaas.config is missing; expected {example}")
    try:
        module, options = parse_login_module(text)
    except ValueError as error:
        raise ClientSecurityError(f"sasl.jaas.config: {error}") from None
    username, password = options.get("username"), options.get("password")
    if module != expected or not username or not password:
        raise ClientSecurityError(f"sasl.jaas.config does not fit {mechanism}; expected {example}")
    if len(username.encode()) > SECRET_BYTES_MAX or len(password.encode()) > SECRET_BYTES_MAX:
        raise ClientSecurityError(f"user and password have at most {SECRET_BYTES_MAX} bytes")
    if "\0" in username + password:
        raise ClientSecurityError("user and password must not contain NUL")
    return ClientSasl(mechanism, username, password)


def _parse_token_file(settings: Mapping[str, str]) -> str:
    url = urlsplit(settings.get("sasl.oauthbearer.token.endpoint.url", ""))
    path = unquote(url.path)
    if url.scheme != "file" or url.netloc not in ("", "localhost") or not path:
        raise ClientSecurityError(
            "OAUTHBEARER needs sasl.oauthbearer.token.endpoint.url=file:///PATH, a file with a "
            "token; other sources of tokens are not supported"
        )
    return path
