"""Principals of client certificates: names as Java prints them, and the rules that map them."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from pydantic import ValidationError

from broker.security.certificate_name import distinguished_name
from config.security.principal_rules import map_principal, parse_principal_rule
from config.settings import TlsSettings

Component = list[tuple[x509.ObjectIdentifier, str]]
# Components of a subject, and what javax.security.auth.x500.X500Principal.getName() returns.
SUBJECTS: list[tuple[list[Component], str]] = [
    ([[(NameOID.COMMON_NAME, "alice")]], "CN=alice"),
    (
        [
            [(NameOID.COUNTRY_NAME, "DE")],
            [(NameOID.STATE_OR_PROVINCE_NAME, "Berlin")],
            [(NameOID.LOCALITY_NAME, "Berlin")],
            [(NameOID.ORGANIZATION_NAME, "Example, Inc.")],
            [(NameOID.ORGANIZATIONAL_UNIT_NAME, "R+D")],
            [(NameOID.COMMON_NAME, "alice")],
        ],
        r"CN=alice,OU=R\+D,O=Example\, Inc.,L=Berlin,ST=Berlin,C=DE",
    ),
    (
        [[(NameOID.COMMON_NAME, "a")], [(NameOID.EMAIL_ADDRESS, "a@example.org")]],
        "1.2.840.113549.1.9.1=#160d61406578616d706c652e6f7267,CN=a",
    ),
    (
        [[(NameOID.DOMAIN_COMPONENT, "org")], [(NameOID.USER_ID, "u1")]],
        "UID=u1,DC=org",
    ),
    ([[(NameOID.COMMON_NAME, 'a=b#c"d\\e;f<g>')]], r"CN=a\=b\#c\"d\\e\;f\<g\>"),
    ([[(NameOID.COMMON_NAME, " ä b ")]], "CN=\\ ä b\\ "),
    (
        [[(NameOID.ORGANIZATION_NAME, "o"), (NameOID.COMMON_NAME, "c")]],
        "CN=c+O=o",
    ),
    ([[(NameOID.SERIAL_NUMBER, "42")]], "2.5.4.5=#13023432"),
]


def certificate(components: list[Component]) -> bytes:
    name = x509.Name(
        [
            x509.RelativeDistinguishedName([x509.NameAttribute(*pair) for pair in component])
            for component in components
        ]
    )
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


@pytest.mark.parametrize(("components", "expected"), SUBJECTS)
def test_a_name_is_printed_as_java_prints_it(components: list[Component], expected: str) -> None:
    assert distinguished_name(certificate(components)) == expected


@pytest.mark.parametrize(
    ("rules", "name", "expected"),
    [
        (["DEFAULT"], "CN=alice,O=x", "CN=alice,O=x"),
        (["RULE:^CN=([^,]+),O=.*$/$1/"], "CN=Alice,O=x", "Alice"),
        (["RULE:^CN=([^,]+),O=.*$/$1/L"], "CN=Alice,O=x", "alice"),
        (["RULE:^CN=([^,]+),O=.*$/$1@$2/U"], "CN=Alice,O=x", "ALICE@$2"),
        (["RULE:^CN=(.*?),O=(.*?)$/$2-$1/", "DEFAULT"], "CN=a,O=b", "b-a"),
        (["RULE:^OU=.*$/x/", "DEFAULT"], "CN=a", "CN=a"),
        (["RULE:^OU=.*$/x/"], "CN=a", None),
        (["RULE:CN=(a)/$1/"], "CN=a,O=b", None),  # the pattern matches the whole name
        ([r"RULE:^CN=(.*)\/(.*)$/$1/"], "CN=a/b", "a"),
    ],
)
def test_the_first_rule_that_matches_names_the_principal(
    rules: list[str], name: str, expected: str | None
) -> None:
    assert map_principal([parse_principal_rule(rule) for rule in rules], name) == expected


@pytest.mark.parametrize(
    "rule", ["", "RULE:", "RULE:a/b", "RULE:(/x/", r"RULE:(a)\1/x/", "default"]
)
def test_an_invalid_rule_is_refused(rule: str) -> None:
    with pytest.raises(ValidationError):
        TlsSettings(principal_mapping_rules=(rule,))  # type: ignore[arg-type]
