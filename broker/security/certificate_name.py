"""The distinguished name of a client certificate, as Kafka prints it (RFC 2253, by Java's rules).

The last component comes first. Types without a keyword in RFC 2253, such as e-mail addresses, are
printed as an object identifier and the hexadecimal DER of the value.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # only a broker with TLS pays for the import
    from cryptography import x509

_ESCAPED: Final = frozenset(',=+<>#;"\\')
_KEYWORDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.25": "DC",
    "0.9.2342.19200300.100.1.1": "UID",
}


def distinguished_name(certificate: bytes) -> str:
    """Return the name of the subject of a certificate in DER. Raises ValueError."""
    from cryptography import x509

    subject = x509.load_der_x509_certificate(certificate).subject
    return ",".join(
        "+".join(_attribute(attribute) for attribute in component)
        for component in reversed(subject.rdns)
    )


def _attribute(attribute: "x509.NameAttribute[str | bytes]") -> str:
    oid = attribute.oid.dotted_string
    keyword = _KEYWORDS.get(oid)
    if keyword is None or not isinstance(attribute.value, str):
        return f"{oid}=#{_der(attribute).hex()}"
    return f"{keyword}={_escape(attribute.value)}"


def _escape(value: str) -> str:
    escaped = "".join(f"\\{c}" if c in _ESCAPED else "\\00" if c == "\0" else c for c in value)
    inner = escaped.strip(" \r")
    start = escaped.find(inner) if inner else len(escaped)
    before, after = escaped[:start], escaped[start + len(inner) :]
    return "".join(f"\\{c}" for c in before) + inner + "".join(f"\\{c}" for c in after)


def _der(attribute: "x509.NameAttribute[str | bytes]") -> bytes:
    """Return the value as DER: what follows the type in the only attribute of a name."""
    from cryptography import x509

    rest = x509.Name([attribute]).public_bytes()
    for _ in range(3):  # into the sequence of components, the set, and the attribute
        rest = _split(rest)[0]
    return _split(rest)[1]


def _split(der: bytes) -> tuple[bytes, bytes]:
    """Return the contents of the first element, and what follows the element."""
    length, start = der[1], 2
    if length >= 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start])
    return der[start : start + length], der[start + length :]
