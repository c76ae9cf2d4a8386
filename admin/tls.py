"""`varve tls init`: a certificate authority and the certificates that it signs, to try TLS with.

All keys are P-256. No file is overwritten, and nothing is written if a file exists.
"""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from admin.command import fail

if TYPE_CHECKING:
    from cryptography import x509

CERTIFICATE_FILE: Final = "ca.pem"
KEY_FILE: Final = "ca.key"
AUTHORITY_DAYS: Final = 3650
LEAF_DAYS: Final = 825  # more than that, some operating systems refuse
CLOCK_SKEW: Final = datetime.timedelta(hours=1)
LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_CLIENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", re.ASCII)


@click.group("tls")
def tls() -> None:
    """Make certificates to try TLS with."""


@tls.command("init", short_help="Make a certificate authority and certificates.")
@click.argument("folder", metavar="DIR")
@click.option("--host", "hosts", multiple=True, metavar="NAME",
              help="Name or address of the broker, besides localhost. Repeatable.")  # fmt: skip
@click.option("--client", "clients", multiple=True, metavar="NAME",
              help="Make a client certificate with this name. Repeatable.")  # fmt: skip
def init(folder: str, hosts: Sequence[str], clients: Sequence[str]) -> None:
    """Make a certificate authority, and certificates for a broker and its clients, in DIR.

    The command prints the settings for the broker and its clients. If DIR has ca.pem and ca.key of
    an earlier call, --client makes certificates for more clients. Whoever can read ca.key can make
    certificates that are trusted: keep it on another machine, or delete it.
    """
    try:
        _check_names(hosts, clients)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    directory = Path(folder).resolve()
    is_new = not os.path.lexists(directory / KEY_FILE)
    if not is_new and (hosts or not clients):
        fail(f"{directory / KEY_FILE} exists; give only --client, or choose another folder")
    try:
        if is_new:
            authority = _Authority.create()
            files = _own_files(authority) | _server_files(authority, (*LOCAL_HOSTS, *hosts))
        else:
            authority, files = _Authority.read(directory), {}
        files |= _client_files(authority, clients)
        _write_all(directory, files)
    except FileExistsError as error:
        fail(f"{error.filename} exists; remove it, or choose another folder")
    except OSError as error:
        fail(f"{error.filename or directory}: {error.strerror or error}")
    except (ValueError, TypeError) as error:  # of cryptography, about the files that were read
        fail(f"cannot use {CERTIFICATE_FILE} and {KEY_FILE} in {directory}: {error}")
    advice = [*_broker_advice(directory, hosts, clients), ""] if is_new else []
    made = f"Files made in {directory}: {', '.join(files)}."
    click.echo("\n".join([made, *advice, *_client_advice(directory, clients)]))


def _check_names(hosts: Sequence[str], clients: Sequence[str]) -> None:
    """Raises ValueError."""
    from config.address import parse_address

    for host in hosts:
        try:
            parse_address(f"[{host}]:1" if ":" in host else f"{host}:1")
        except ValueError:
            raise ValueError(f"--host {host[:80]!r} is not a host name or an address") from None
    for client in clients:
        if not _CLIENT.fullmatch(client):
            raise ValueError(f"--client {client[:80]!r}: expected up to 64 letters, digits and -._")


def _own_files(authority: "_Authority") -> dict[str, bytes]:
    """Return the content of each file, by name; so do the functions below."""
    builder = authority.own_builder()
    return {
        CERTIFICATE_FILE: _sign(builder, authority.key),
        KEY_FILE: _key_pem(authority.key),
    }


def _server_files(authority: "_Authority", hosts: Sequence[str]) -> dict[str, bytes]:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names = [_general_name(host) for host in dict.fromkeys(hosts)]
    certificate, key = authority.sign(
        "varve broker", ExtendedKeyUsageOID.SERVER_AUTH, x509.SubjectAlternativeName(names)
    )
    return {"server.pem": certificate, "server.key": key}


def _client_files(authority: "_Authority", clients: Sequence[str]) -> dict[str, bytes]:
    from cryptography.x509.oid import ExtendedKeyUsageOID

    files = {}
    for client in clients:
        certificate, key = authority.sign(client, ExtendedKeyUsageOID.CLIENT_AUTH, None)
        files[_client_file(client)] = key + certificate
    return files


def _client_file(client: str) -> str:
    return f"client-{client}.pem"


class _Authority:
    """A certificate authority that signs no other authority."""

    def __init__(self, name: "x509.Name", key: Any) -> None:
        from cryptography import x509

        self.key = key
        self._name = name
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())

    @classmethod
    def create(cls) -> "_Authority":
        """Return a new one. Each has its own name: clients find the one that signed by it."""
        from cryptography.hazmat.primitives.asymmetric import ec

        name = _x509_name(f"varve authority {os.urandom(4).hex()}")
        return cls(name, ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def read(cls, directory: Path) -> "_Authority":
        """Return the one of these files. Raises OSError, ValueError, TypeError."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        certificate = x509.load_pem_x509_certificate((directory / CERTIFICATE_FILE).read_bytes())
        key = load_pem_private_key((directory / KEY_FILE).read_bytes(), None)
        if key.public_key() != certificate.public_key():
            raise ValueError("they do not belong together")
        return cls(certificate.subject, key)

    def own_builder(self) -> "x509.CertificateBuilder":
        """Return its own certificate, unsigned."""
        from cryptography import x509

        return (
            self._builder(self._name, self.key.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(self._identifier, critical=False)
        )

    def sign(
        self, name: str, usage: "x509.ObjectIdentifier", names: "x509.ExtensionType | None"
    ) -> tuple[bytes, bytes]:
        """Return a new certificate and its key as PEM."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier)
        builder = (
            self._builder(_x509_name(name), key.public_key(), LEAF_DAYS)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(issuer, critical=False)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return _sign(builder, self.key), _key_pem(key)

    def _builder(self, name: "x509.Name", key: Any, days: int) -> "x509.CertificateBuilder":
        from cryptography import x509

        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + datetime.timedelta(days=days))
        )


def _sign(builder: "x509.CertificateBuilder", key: Any) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding

    pem: bytes = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return pem


def _key_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def _x509_name(text: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs_certificates: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_all(directory: Path, files: dict[str, bytes]) -> None:
    """Write new files; only the owner can read those with keys. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in files:
        if os.path.lexists(directory / name):
            raise FileExistsError(17, "exists", str(directory / name))
    for name, content in files.items():
        mode = 0o600 if b"PRIVATE KEY" in content else 0o644
        fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(fd, "wb") as file:
            file.write(content)


def _broker_advice(directory: Path, hosts: Sequence[str], clients: Sequence[str]) -> list[str]:
    lines = [
        f"Settings of the broker, for certificates in {directory}:",
        "",
        f"listeners: [{_listener(hosts[0] if hosts else 'localhost')}]",
        "http_tls: true",
        "tls:",
        f"  certificate_file: {directory}/server.pem",
        f"  key_file: {directory}/server.key",
    ]
    if clients:
        lines += [f"  ca_file: {directory}/{CERTIFICATE_FILE}", "  client_auth: required"]
    return lines


def _client_advice(directory: Path, clients: Sequence[str]) -> list[str]:
    lines = [
        "Settings of a client, for Kafka's tools and --command-config of varve:",
        "",
        "security.protocol=SSL",
        "ssl.truststore.type=PEM",
        f"ssl.truststore.location={directory}/{CERTIFICATE_FILE}",
    ]
    if clients:
        lines += [
            "ssl.keystore.type=PEM",
            f"ssl.keystore.location={directory}/{_client_file(clients[0])}",
        ]
    if clients[1:]:
        others = ", ".join(map(_client_file, clients[1:]))
        lines += ["", f"For the other clients, name their files in ssl.keystore.location: {others}"]
    return lines


def _listener(host: str) -> str:
    """Return a listener that clients reach under a host name or an IP address, as YAML."""
    from cryptography import x509

    if host != "localhost" and isinstance(_general_name(host), x509.DNSName):
        return (
            f'{{name: OUTSIDE, protocol: SSL, address: "0.0.0.0:9093", advertise: "{host}:9093"}}'
        )
    return f'"SSL://[{host}]:9093"' if ":" in host else f'"SSL://{host}:9093"'
