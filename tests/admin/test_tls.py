"""`varve tls init`: certificates that real clients accept, and files that nobody else can read."""

import signal
import socket
import ssl
import stat
from functools import partial
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from cryptography.x509 import load_pem_x509_certificate

from admin.client import ApiClient
from admin.tls import tls
from config.security.clients import Cluster, read_command_config
from config.settings import Settings
from protocol.client.administration import LogDirClient
from protocol.client.connection import SecurityRefusedError
from tests.support.ports import free_port
from tests.support.varve import running_varve
from tests.support.waiting import wait_until


def make(folder: Path, *options: str) -> list[str]:
    done = CliRunner().invoke(tls, ["init", str(folder), *options])
    assert done.exit_code == 0, done.output
    return done.output.split("\n\n")


def test_the_printed_settings_connect_a_client_to_a_broker(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    _, settings, _, client = make(folder, "--host", "127.0.0.2", "--client", "alice")
    file = tmp_path / "client.properties"
    file.write_text(client)
    security = read_command_config(str(file))
    port = free_port()
    listeners = {"listeners": [f"SSL://0.0.0.0:{port}"]}
    with running_varve(tmp_path / "varve", yaml.safe_load(settings) | listeners) as broker:
        api = ApiClient(f"https://localhost:{broker.http_port}", security=security)
        for _ in range(20):
            assert "workers" in api.get("")
        for host in ("localhost", "127.0.0.1", "127.0.0.2"):
            with LogDirClient(Cluster(f"{host}:{port}", security)) as sizes:
                assert sizes.size_of("none") == 0
        with pytest.raises(SecurityRefusedError, match="IP address mismatch"):
            LogDirClient(Cluster(f"127.0.0.3:{port}", security))


def test_the_authority_signs_a_certificate_for_a_later_client(tmp_path: Path) -> None:
    make(tmp_path, "--client", "alice")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    advice = "\n\n".join(make(tmp_path, "--client", "bob"))
    assert f"ssl.keystore.location={tmp_path}/client-bob.pem" in advice
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    authority = load_pem_x509_certificate(after["ca.pem"])
    load_pem_x509_certificate(after.pop("client-bob.pem")).verify_directly_issued_by(authority)
    assert after == before
    for options in ([], ["--client", "alice"], ["--client", "carol", "--host", "example.org"]):
        done = CliRunner().invoke(tls, ["init", str(tmp_path), *options])
        assert (done.exit_code, " exists; " in done.output) == (1, True)
    (tmp_path / "ca.pem").write_bytes(after["server.pem"])
    done = CliRunner().invoke(tls, ["init", str(tmp_path), "--client", "carol"])
    assert (done.exit_code, "do not belong together" in done.output) == (1, True)
    assert not (tmp_path / "client-carol.pem").exists()


def test_only_the_owner_can_read_keys(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    make(folder, "--client", "alice", "--client", "bob")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {
        "ca.key": 0o600, "ca.pem": 0o644, "server.key": 0o600, "server.pem": 0o644,
        "client-alice.pem": 0o600, "client-bob.pem": 0o600,
    }  # fmt: skip


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "server.key").symlink_to(tmp_path / "target")
    done = CliRunner().invoke(tls, ["init", str(tmp_path)])
    assert (done.exit_code, "server.key exists; remove it" in done.output) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["server.key"]


@pytest.mark.parametrize(
    "options", [["--host", "a b"], ["--host", ""], ["--client", "../x"], ["--client", "x" * 65]]
)
def test_names_that_cannot_be_used_are_refused(tmp_path: Path, options: list[str]) -> None:
    done = CliRunner().invoke(tls, ["init", str(tmp_path / "tls"), *options])
    assert (done.exit_code, options[0] in done.output) == (2, True)
    assert not (tmp_path / "tls").exists()


def test_the_advice_is_a_settings_file_that_starts_under_a_name_of_another_machine(
    tmp_path: Path,
) -> None:
    options = ["--host", "kafka.example.org", "--client", "alice", "--client", "admin"]
    done = CliRunner().invoke(tls, ["init", str(tmp_path), *options])
    advice = done.output.partition("\n\n")[2].partition("\n\n")[0]
    loaded = Settings.model_validate(yaml.safe_load(advice))
    (listener,) = loaded.listeners
    assert (str(listener.address), str(listener.advertise)) == (
        "0.0.0.0:9093", "kafka.example.org:9093"
    )  # fmt: skip
    assert "ssl.keystore.location: client-admin.pem" in done.output


def test_sighup_replaces_the_certificates_of_kafka_and_https(tmp_path: Path) -> None:
    make(tmp_path / "old")
    make(tmp_path / "new")
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"

    def use(folder: str) -> None:
        certificate.write_bytes((tmp_path / folder / "server.pem").read_bytes())
        key.write_bytes((tmp_path / folder / "server.key").read_bytes())

    use("old")
    port = free_port()
    settings = {
        "listeners": [f"SSL://127.0.0.1:{port}"],
        "http_tls": True,
        "tls": {"certificate_file": str(certificate), "key_file": str(key)},
    }
    with running_varve(tmp_path / "varve", settings) as broker:
        for folder in ("old", "new"):
            use(folder)
            broker.process.send_signal(signal.SIGHUP)
            for number in (port, broker.http_port):
                context = ssl.create_default_context(cafile=str(tmp_path / folder / "ca.pem"))
                wait_until(partial(is_trusted, context, number), f"{folder} certificate")


def is_trusted(context: ssl.SSLContext, port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            context.wrap_socket(plain, server_hostname="localhost").close()
    except ssl.SSLCertVerificationError:
        return False
    return True
