"""The options with which jobs connect format("varve") to a cluster."""

from typing import Final

from config.security.clients import PLAINTEXT, Cluster

BOOTSTRAP: Final = "kafka.bootstrap.servers"
# `ClientSecurity.to_text`. Spark redacts options whose names contain "secret" wherever it shows
# them (spark.redaction.regex).
CONNECTION_SECRET: Final = "varve.connection.secret"


def connection_options(cluster: Cluster) -> dict[str, str]:
    """Return the options that connect a source or a sink to a cluster."""
    options = {BOOTSTRAP: ",".join(map(str, cluster.addresses))}
    if cluster.security != PLAINTEXT:
        options[CONNECTION_SECRET] = cluster.security.to_text()
    return options
