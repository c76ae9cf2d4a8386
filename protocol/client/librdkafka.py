"""The settings of TLS and SASL for librdkafka, which writes for `varve demo` and the pipeline."""

import base64
import json
import time
from typing import Any, Final

from config.security.clients import OAUTHBEARER, ClientSasl, Cluster

# librdkafka asks for a new token when 0.8 of the lifetime are over. A token that names no time of
# expiry is read again after this time.
TOKEN_SECONDS: Final = 300.0


def connection_settings(cluster: Cluster) -> dict[str, Any]:
    """Return the settings that connect a client of librdkafka to a cluster."""
    security = cluster.security
    settings: dict[str, Any] = {
        "bootstrap.servers": ",".join(map(str, cluster.addresses)),
        "security.protocol": security.protocol,
    }
    tls = security.kafka_tls
    if tls is not None:
        if tls.authorities is not None:
            settings["ssl.ca.pem"] = tls.authorities
        if tls.certificate is not None and tls.key is not None:
            settings["ssl.certificate.pem"] = tls.certificate
            settings["ssl.key.pem"] = tls.key
        settings["ssl.endpoint.identification.algorithm"] = "https" if tls.verifies_host else "none"
    if security.kafka_sasl is not None:
        settings |= _sasl_settings(security.kafka_sasl)
    return settings


def _sasl_settings(sasl: ClientSasl) -> dict[str, Any]:
    if sasl.mechanism == OAUTHBEARER:
        return {"sasl.mechanism": sasl.mechanism, "oauth_cb": lambda _config: _read_token(sasl)}
    return {
        "sasl.mechanism": sasl.mechanism,
        "sasl.username": sasl.username,
        "sasl.password": sasl.password,
    }


def _read_token(sasl: ClientSasl) -> tuple[str, float]:
    """Return the token and the seconds since 1970 at which it expires."""
    token = sasl.read_token()
    expires = time.time() + TOKEN_SECONDS
    parts = token.split(".")
    if len(parts) == 3:  # a JWT (RFC 7519)
        try:
            claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
            expires = float(claims["exp"])
        except (ValueError, KeyError, TypeError):
            return token, expires
    return token, expires
