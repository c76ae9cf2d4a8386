"""A client of TLS 1.3 that encrypts its own records, to send what Python's ssl cannot."""

import asyncio
import hmac
import ssl
import struct
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.support.certificates import Authority

CIPHER = "TLS_AES_256_GCM_SHA384"
HANDSHAKE, APPLICATION_DATA = 22, 23
KEY_UPDATE = bytes((24, 0, 0, 1, 0))  # without a request for one of the server
KEY_UPDATE_REQUEST = bytes((24, 0, 0, 1, 1))


class ClientRecords:
    """Encrypts what a client sends after the handshake."""

    def __init__(self, secret: bytes) -> None:
        self._use(secret)

    def key_updates(self, count: int, message: bytes = KEY_UPDATE) -> bytes:
        """Return messages that each replace the client's key."""
        updates = []
        for _ in range(count):
            updates.append(self._encrypt(message, HANDSHAKE))
            self._use(_expand(self._secret, b"traffic upd", 48))
        return b"".join(updates)

    def data(self, data: bytes) -> bytes:
        return self._encrypt(data, APPLICATION_DATA)

    def _use(self, secret: bytes) -> None:
        self._secret, self._sequence = secret, 0
        self._key = AESGCM(_expand(secret, b"key", 32))
        self._iv = int.from_bytes(_expand(secret, b"iv", 12))

    def _encrypt(self, data: bytes, kind: int) -> bytes:
        nonce = (self._iv ^ self._sequence).to_bytes(12)
        self._sequence += 1
        head = struct.pack(">BHH", APPLICATION_DATA, 0x0303, len(data) + 17)
        return head + self._key.encrypt(nonce, data + bytes((kind,)), head)


class RecordClient:
    """A connection after its handshake."""

    def __init__(
        self,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        records: ClientRecords,
    ) -> None:
        self.reader, self.writer = streams
        self.records = records
        self._tls, self._incoming = tls, incoming

    async def read(self) -> bytes:
        """Return decrypted bytes; none when the server has closed the connection."""
        while True:
            try:
                return self._tls.read(1 << 16)
            except ssl.SSLWantReadError:
                try:
                    received = await asyncio.wait_for(self.reader.read(1 << 16), 20)
                except ConnectionError:
                    return b""
                if not received:
                    return b""
                self._incoming.write(received)
            except ssl.SSLError:  # an alert
                return b""


async def connect(port: int, authority: Authority) -> RecordClient:
    secrets = Path(authority.folder, "secrets")
    context = ssl.create_default_context(cafile=authority.path)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.keylog_filename = str(secrets)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await asyncio.wait_for(reader.read(1 << 16), 20))
    writer.write(outgoing.read())
    cipher = tls.cipher()
    assert cipher is not None
    assert cipher[0] == CIPHER
    return RecordClient((reader, writer), tls, incoming, ClientRecords(_read_secret(secrets)))


def _read_secret(path: Path) -> bytes:
    """Return the secret of the last connection."""
    lines = path.read_text().splitlines()
    last = [line for line in lines if line.startswith("CLIENT_TRAFFIC_SECRET_0 ")][-1]
    return bytes.fromhex(last.split()[2])


def _expand(secret: bytes, label: bytes, length: int) -> bytes:
    """HKDF-Expand-Label of RFC 8446, without a context."""
    label = b"tls13 " + label
    info = struct.pack(">HB", length, len(label)) + label + b"\0"
    return hmac.digest(secret, info + b"\1", "sha384")[:length]
