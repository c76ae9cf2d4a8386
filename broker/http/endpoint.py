"""The HTTP server as the settings describe it: its address, certificate and tokens."""

from secrets import token_urlsafe

from broker.cleaning.spark_offload import OwnApi
from broker.event_loop.loop_turns import ConnectionTurns
from broker.http.access import Guard
from broker.http.authentication import Allows, HttpAuthentication
from broker.http.observation import HttpObserver
from broker.http.server import Health, HttpServer, MetricsSource, Routes
from broker.quotas.connection_rates import ConnectionRates
from broker.security.sasl import Authentication
from broker.security.tls import ServerTls
from config.address import Address
from config.settings import Settings


class HttpEndpoint:
    """Starts and stops the server, and applies the token and the certificate of a reload."""

    def __init__(
        self,
        settings: Settings,
        authentication: Authentication,
        allows: Allows,
        routes: Routes,
        *,
        token: bytes | None,
        health: Health,
        observer: HttpObserver,
        rates: ConnectionRates,
        turns: ConnectionTurns,
        early_metrics: MetricsSource,
    ) -> None:
        """`token` is that of `http_token_file`; `early_metrics` are served until `open`."""
        self.address = settings.http  # after `start`: the bound one
        self._has_tls = settings.http_tls
        self._has_users = settings.http_users
        self._token = token
        self._own_token = token_urlsafe(32).encode()
        self._tls: ServerTls | None = None  # set by `start`
        self.server = HttpServer(
            health,
            Guard.of(settings.http, self.scheme),
            HttpAuthentication(
                authentication,
                allows,
                self._tokens(),
                has_users=settings.http_users,
                has_permissions=settings.authorization.enabled,
            ),
            routes,
            observer=observer,
            rates=rates,
            turns=turns,
            early_metrics=early_metrics,
        )

    @property
    def scheme(self) -> str:
        """Return the scheme of URLs."""
        return "https" if self._has_tls else "http"

    @property
    def tls_failures(self) -> int:
        """Return the number of connections whose handshake failed."""
        return self.server.tls_failures

    async def start(self, tls: ServerTls | None) -> None:
        """Answer health checks; the server refuses everything else until `open`. Raises OSError."""
        self._tls = tls if self._has_tls else None
        context = None if self._tls is None else self._tls.password_context
        host, port = await self.server.start(self.address.host, self.address.port, context)
        self.address = Address(host, port)

    def open(self, metrics: MetricsSource) -> None:
        """Serve everything from now on."""
        self.server.open(metrics)

    async def stop(self) -> None:
        """Close the listener and its connections."""
        await self.server.stop()

    def reload(self, *, token: bytes | None, tls: ServerTls | None) -> None:
        """Use another token for new requests, and another certificate for new connections."""
        self._token = token
        self.server.authentication.tokens = self._tokens()
        if self._tls is not None and tls is not None:
            self._tls = tls
            self.server.use_certificate(tls.password_context)

    def own_api(self) -> OwnApi:
        """Return how a job of this broker reaches the API."""
        return OwnApi(
            f"{self.scheme}://{self.address.here}",
            next(iter(self._tokens()), None),
            None if self._tls is None else self._tls.chain,
        )

    def _tokens(self) -> tuple[bytes, ...]:
        """Return the accepted tokens: that of the settings, else one for our own jobs if needed."""
        if self._token is None and self._has_users:
            return (self._own_token,)
        return () if self._token is None else (self._token,)
