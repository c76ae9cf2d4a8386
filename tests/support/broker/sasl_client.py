"""A client that authenticates over asyncio, one message at a time."""

import asyncio
import base64
import hashlib
import hmac
import struct
from typing import Any

from broker.app import Broker
from protocol import codec
from protocol import messages as m
from protocol.api import ApiKey

CLIENT_NONCE = "fyko+d2lbbFgONRv9qkxdawL"


class SaslClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, broker: Broker, host: str = "127.0.0.1", index: int = 0) -> "SaslClient":
        address = broker.addresses[index]
        return cls(*await asyncio.open_connection(address.host, address.port, local_addr=(host, 0)))

    async def send_frame(self, data: bytes) -> bytes:
        """Send a frame; return the answer's frame."""
        self.writer.write(struct.pack(">i", len(data)) + data)
        (size,) = struct.unpack(">i", await asyncio.wait_for(self.reader.readexactly(4), 20))
        return await self.reader.readexactly(size)

    async def ask(self, key: ApiKey, version: int, body: m.Message) -> Any:
        request = codec.encode_request(key, version, 1, "c", body)
        return codec.decode_response(key, version, await self.send_frame(request[4:]))[1]

    async def shake_hands(self, mechanism: str, version: int = 1) -> m.SaslHandshakeResponse:
        answer = await self.ask(
            ApiKey.SASL_HANDSHAKE, version, m.SaslHandshakeRequest(mechanism=mechanism)
        )
        assert isinstance(answer, m.SaslHandshakeResponse)
        return answer

    async def send_token(self, token: bytes, version: int = 2) -> m.SaslAuthenticateResponse:
        answer = await self.ask(
            ApiKey.SASL_AUTHENTICATE, version, m.SaslAuthenticateRequest(auth_bytes=token)
        )
        assert isinstance(answer, m.SaslAuthenticateResponse)
        return answer

    async def plain(self, user: str, password: str) -> m.SaslAuthenticateResponse:
        assert (await self.shake_hands("PLAIN")).error_code == 0
        return await self.send_token(f"\0{user}\0{password}".encode())

    async def scram(
        self, user: str, password: str, mechanism: str = "SCRAM-SHA-256"
    ) -> m.SaslAuthenticateResponse:
        assert (await self.shake_hands(mechanism)).error_code == 0
        challenge = await self.send_token(scram_first(user))
        assert challenge.error_code == 0
        return await self.send_token(
            scram_final(user, password, bytes(challenge.auth_bytes), mechanism)
        )

    async def is_served(self) -> bool:
        answer = await self.ask(ApiKey.METADATA, 9, m.MetadataRequest(topics=[]))
        return len(answer.brokers) == 1

    async def is_closed(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(), 20) == b""
        except ConnectionError:
            return True
        finally:
            self.close()

    def close(self) -> None:
        self.writer.close()


def scram_first(user: str) -> bytes:
    return f"n,,n={user},r={CLIENT_NONCE}".encode()


def scram_final(user: str, password: str, challenge: bytes, mechanism: str) -> bytes:
    """The client's last message (RFC 5802, section 3), written independently of the broker's."""
    fields = dict(field.split(b"=", 1) for field in challenge.split(b","))
    name = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}[mechanism]
    salted = hashlib.pbkdf2_hmac(
        name, password.encode(), base64.b64decode(fields[b"s"]), int(fields[b"i"])
    )
    without_proof = b"c=biws,r=" + fields[b"r"]
    signed = scram_first(user)[3:] + b"," + challenge + b"," + without_proof
    client_key = hmac.digest(salted, b"Client Key", name)
    signature = hmac.digest(hashlib.new(name, client_key).digest(), signed, name)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return without_proof + b",p=" + base64.b64encode(proof)
