"""An identity provider for tests: keys, and tokens that they sign."""

import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

AUDIENCE = "varve"
ISSUER = "https://issuer.example"


class IdentityProvider:
    def __init__(self) -> None:
        self._keys: dict[str, tuple[str, Any]] = {}
        self.add_key("first")

    def add_key(self, key_id: str, algorithm: str = "ES256") -> None:
        if algorithm.startswith("ES"):
            self._keys[key_id] = algorithm, ec.generate_private_key(ec.SECP256R1())
        else:
            self._keys[key_id] = algorithm, rsa.generate_private_key(65537, 2048)

    def jwks(self) -> bytes:
        kinds: dict[str, Any] = {"E": jwt.algorithms.ECAlgorithm, "R": jwt.algorithms.RSAAlgorithm}
        kinds["P"] = kinds["R"]
        keys = [
            {**kinds[algorithm[0]].to_jwk(key.public_key(), as_dict=True), "kid": key_id}
            for key_id, (algorithm, key) in self._keys.items()
        ]
        return json.dumps({"keys": keys}).encode()

    def token(self, ends: float, key_id: str = "first", **claims: Any) -> str:
        """A token for alice; a claim of None is left out."""
        algorithm, key = self._keys[key_id]
        values = {"sub": "alice", "iss": ISSUER, "aud": AUDIENCE, "exp": ends, **claims}
        present = {name: value for name, value in values.items() if value is not None}
        return jwt.encode(present, key, algorithm, headers={"kid": key_id})
