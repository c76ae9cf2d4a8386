"""Addresses: HOST:PORT as operators write it, and whether other machines can reach it.

Kafka writes listener addresses with the protocol (`SSL://HOST:PORT`), and its clients accept
bootstrap addresses in that form, too.
"""

import ipaddress
import re
from dataclasses import dataclass

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?", re.ASCII)
_PROTOCOL = re.compile(r"([A-Za-z0-9_-]{1,40})://(.*)", re.ASCII | re.DOTALL)
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on or to advertise. Port 0 means any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Return whether this is 0.0.0.0 or [::], every address of this machine."""
        ip = _ip(self.host)
        return ip is not None and ip.is_unspecified

    @property
    def here(self) -> "Address":
        """Return the address that this machine connects to: loopback for a wildcard."""
        if not self.is_wildcard:
            return self
        return Address("::1" if ":" in self.host else "127.0.0.1", self.port)

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach it. Of host names only `localhost` counts."""
        ip = _ip(self.host)
        return ip.is_loopback if ip is not None else self.host.lower() == "localhost"


def parse_address(text: object) -> Address:
    """Read "127.0.0.1:9092", "[::1]:9092" or "name:9092". Raises ValueError."""
    if isinstance(text, Address):
        return text
    if not isinstance(text, str):
        raise ValueError(f"expected HOST:PORT, not {text!r}")
    scheme, separator, _ = text.strip().partition("://")
    if separator:
        raise ValueError(f"expected HOST:PORT, without {scheme[:40]}://, not {text[:80]!r}")
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or not _PORT.fullmatch(port):
        raise ValueError(f"expected HOST:PORT, not {text[:80]!r}")
    if int(port) > PORT_MAX:
        raise ValueError(f"the port {port} is above {PORT_MAX}")
    if bracketed != (":" in host):
        raise ValueError(f"an IPv6 address is written [ADDRESS]:PORT, not {text[:80]!r}")
    if _ip(host) is None and (bracketed or not _HOST.fullmatch(host)):
        raise ValueError(f"{host[:80]!r} is neither an address nor a host name")
    return Address(host, int(port))


def parse_kafka_address(text: object) -> Address:
    """Read an address that Kafka clients connect to: HOST:PORT, or PLAINTEXT://HOST:PORT.

    Raises ValueError.
    """
    protocol, address = parse_protocol_address(text)
    if protocol != "PLAINTEXT":
        raise ValueError(
            f"the protocol {protocol}:// is not supported here; expected HOST:PORT or "
            "PLAINTEXT://HOST:PORT"
        )
    return address


def parse_protocol_address(text: object) -> tuple[str, Address]:
    """Read PROTOCOL://HOST:PORT, or HOST:PORT for PLAINTEXT. Raises ValueError."""
    match = _PROTOCOL.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not isinstance(text, str):
        return "PLAINTEXT", parse_address(text)
    protocol, rest = match.group(1).upper(), match.group(2)
    if protocol not in PROTOCOLS:
        raise ValueError(
            f"the protocol {match.group(1)}:// is not supported; expected HOST:PORT, or one of "
            f"{', '.join(PROTOCOLS)} before ://HOST:PORT"
        )
    if rest.startswith(":"):
        raise ValueError(
            f"{text[:80]!r} has no host; to listen on every address of this machine, write "
            f"0.0.0.0{rest[:10]}"
        )
    return protocol, parse_address(rest)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
