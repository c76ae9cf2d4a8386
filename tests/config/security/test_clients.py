"""TLS and SASL of clients, read from Kafka's settings."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from config.security.clients import (
    PLAINTEXT,
    ClientSasl,
    ClientSecurity,
    ClientSecurityError,
    Cluster,
    parse_client_security,
    read_command_config,
)
from config.security.properties import parse_login_module, parse_properties
from tests.support.certificates import Authority

PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_properties_are_read_as_java_reads_them() -> None:
    text = (
        "# comment\n! another\n\n  a = 1\nb:2\nc 3\nlong=x\\\n   y\\\n  z\nd\\ e = f\\u00e9\\t.\n"
        "rare=\u00a0x\u2028y\x85z\r\nold=mac\r"
        "path=C\\:\\\\x\nempty\na=last \n#trailing\\\nend=\\\\\\\n"
    )
    assert parse_properties(text) == {
        "a": "last ", "b": "2", "c": "3", "long": "xyz", "d e": "fé\t.", "path": "C:\\x",
        "empty": "", "end": "\\", "rare": "\u00a0x\u2028y\x85z", "old": "mac",
    }  # fmt: skip


def test_login_modules_are_read_as_java_reads_them() -> None:
    module, options = parse_login_module(
        f'{PLAIN_MODULE} required username=\'al ice\' "password"="a\\"b;c=d\\\\\\n\\101" x=1;'
    )
    assert (module, options) == (
        PLAIN_MODULE,
        {"username": "al ice", "password": 'a"b;c=d\\\nA', "x": "1"},
    )


@pytest.mark.parametrize(
    "text",
    ["", ";", "module;", "m required a;", "m required a=;", 'm required a="x', "m required a=b"],
)
def test_a_broken_login_module_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"login module|expected CLASS"):
        parse_login_module(text)


def sasl(mechanism: str, **more: str) -> dict[str, str]:
    module = "plain.Plain" if mechanism == "PLAIN" else "scram.Scram"
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f"org.apache.kafka.common.security.{module}LoginModule required "
        'username="alice" password="s3cret";',
        **more,
    }


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_user_and_a_password_are_read_and_hidden(mechanism: str) -> None:
    security = parse_client_security(sasl(mechanism))
    assert security.kafka_sasl == ClientSasl(mechanism, "alice", "s3cret")
    assert "s3cret" not in repr(Cluster("h:1", security))
    assert ClientSecurity.from_text(security.to_text()) == security


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"security.protocol": "TLS"}, "security.protocol is TLS, not one of"),
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism is missing; supported: PLAIN"),
        (sasl("GSSAPI"), "sasl.mechanism is GSSAPI; supported"),
        ({**sasl("PLAIN"), "sasl.mechanism": "SCRAM-SHA-256"}, "does not fit SCRAM-SHA-256"),
        ({**sasl("PLAIN"), "sasl.jaas.config": "s3cret"}, "does not end with a semicolon"),
        ({**sasl("PLAIN"), "sasl.jaas.config": f"{PLAIN_MODULE} required;"}, "does not fit"),
        (sasl("PLAIN", **{"sasl.login.class": "X"}), "sasl.login.class is not supported"),
        (sasl("OAUTHBEARER"), "OAUTHBEARER needs sasl.oauthbearer.token.endpoint.url=file:"),
        ({"security.protocl": "SSL"}, "not supported; did you mean security.protocol?"),
        ({"SECURITY.PROTOCOL": "SSL"}, "not supported; did you mean security.protocol?"),
        ({"security.mode": "SSL"}, "security.mode is not supported"),
        ({"sasl.username": "ann"}, "is a name of librdkafka: use sasl.jaas.config"),
        ({"ssl.cipher.suites": "X"}, "ssl.cipher.suites is not supported"),
        ({"ssl.endpoint.identification.algorithm": "x"}, "neither https nor empty"),
        ({"ssl.enabled.protocols": "TLSv1.1"}, "neither TLSv1.2 nor TLSv1.3"),
        ({"ssl.truststore.location": "/no/file"}, "/no/file: No such file"),
        ({"ssl.truststore.type": "BKS"}, "ssl.truststore.type is BKS"),
        ({"ssl.truststore.certificates": "x"}, "ssl.truststore.certificates: "),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    settings: dict[str, str], reason: str
) -> None:
    with pytest.raises(ClientSecurityError, match=reason) as error:
        parse_client_security(settings)
    assert "s3cret" not in str(error.value)


def test_settings_of_other_parts_of_a_client_are_ignored() -> None:
    others = ("client.id", "connections.max.idle.ms", "retries", "request.timeout.ms", "acks")
    assert parse_client_security(dict.fromkeys(others, "1")) == PLAINTEXT


def test_pem_and_pkcs12_give_the_same_certificates(authority: Authority) -> None:
    leaf = authority.leaf("client")
    pem = {
        "security.protocol": "SSL",
        "ssl.truststore.location": authority.path,
        "ssl.truststore.type": "PEM",
        "ssl.keystore.location": authority.write("client.pem", leaf.pem("k3y")),
        "ssl.key.password": "k3y",
    }
    pkcs12 = {
        **pem,
        "ssl.keystore.location": authority.write("client.p12", leaf.pkcs12("st0re")),
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.password": "st0re",
    }
    tls = parse_client_security(pem).tls
    assert tls == parse_client_security(pkcs12).tls
    assert tls.key is not None
    assert "PRIVATE KEY" not in repr(tls)
    assert (tls.public_part.certificate, tls.public_part.key) == (None, None)
    assert tls.public_part.authorities == tls.authorities
    for wrong in ({**pem, "ssl.key.password": "gu3ss"}, {**pkcs12, "ssl.keystore.password": ""}):
        with pytest.raises(ClientSecurityError, match=r"ssl\.keystore\.location") as error:
            parse_client_security(wrong)
        assert "gu3ss" not in str(error.value)


@pytest.mark.skipif(shutil.which("keytool") is None, reason="keytool (Java) is not installed")
def test_stores_of_keytool_are_read_and_jks_is_refused(authority: Authority) -> None:
    for kind in ("PKCS12", "JKS"):
        path = str(authority.folder / f"trust.{kind}")
        command = ["keytool", "-importcert", "-noprompt", "-alias", "ca", "-storepass", "changeit"]
        command += ["-keystore", path, "-storetype", kind, "-file", authority.path]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    settings = {"security.protocol": "SSL", "ssl.truststore.password": "changeit"}
    path = f"{authority.folder}/trust.PKCS12"
    tls = parse_client_security({**settings, "ssl.truststore.location": path}).tls
    assert tls.authorities == Path(authority.path).read_text()
    path = f"{authority.folder}/trust.JKS"
    with pytest.raises(ClientSecurityError, match="JKS is not supported; convert the file with"):
        parse_client_security({**settings, "ssl.truststore.location": path})


def test_host_names_and_tls_1_2_are_the_default() -> None:
    context = parse_client_security({"security.protocol": "SSL"}).tls.context()
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    relaxed = {
        "ssl.endpoint.identification.algorithm": "",
        "ssl.enabled.protocols": "TLSv1.3",
    }
    context = parse_client_security(relaxed).tls.context()
    assert (context.check_hostname, context.verify_mode) == (False, ssl.CERT_REQUIRED)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_a_token_is_read_again_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a token"
    settings = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": path.as_uri(),
    }
    security = parse_client_security(settings)
    assert security.sasl is not None
    for token in ("a.b.c", "d.e.f"):
        path.write_text(f"{token}\n")
        assert security.sasl.read_token() == token
    path.write_text("two tokens")
    with pytest.raises(ClientSecurityError, match="does not contain one token"):
        security.sasl.read_token()


def test_a_command_config_names_its_file_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nclient.id=x\n")
    with pytest.raises(ClientSecurityError, match=r"client\.properties: sasl\.jaas\.config is mis"):
        read_command_config(str(path))
    with pytest.raises(ClientSecurityError, match=r"/no/such: No such file"):
        read_command_config("/no/such")


def test_a_bootstrap_address_may_name_the_protocol() -> None:
    security = parse_client_security({"security.protocol": "SSL"})
    assert [str(a) for a in Cluster("SSL://a:1, b:2", security).addresses] == ["a:1", "b:2"]
    with pytest.raises(ValueError, match=r"does not fit security\.protocol SSL"):
        Cluster("PLAINTEXT://a:1", security)
