"""The HTTP side: /metrics, /healthz, /readyz. aiohttp carries it (docs/decisions/0001).

Loopback by default; the Host header is checked, so that a web page opened on this machine cannot
reach it under another name (DNS rebinding).
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 1 << 20  # nothing that is served here takes more


class Health(Protocol):
    """What the daemon says of itself."""

    def not_ready_because(self) -> str | None:
        """None when clients are served; else the reason, in words."""
        ...

    def unhealthy_because(self) -> str | None:
        """None while the process does its work; else the reason, in words."""
        ...


class HttpServer:
    """Serves the observability endpoints; routes of the API are added by `application`."""

    def __init__(
        self, registry: CollectorRegistry, health: Health, allowed_hosts: set[str]
    ) -> None:
        self._registry = registry
        self._health = health
        self._allowed_hosts = allowed_hosts
        self.application = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[self._check_host]
        )
        self.application.router.add_get("/metrics", self._metrics)
        self.application.router.add_get("/healthz", self._healthz)
        self.application.router.add_get("/readyz", self._readyz)
        self._runner = web.AppRunner(
            self.application, handle_signals=False, access_log=None, shutdown_timeout=2.0
        )

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the bound address. Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = self._runner.addresses[0]
        return str(bound[0]), int(bound[1])

    async def stop(self) -> None:
        """Close the listener and its connections."""
        await self._runner.cleanup()

    @web.middleware
    async def _check_host(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._allowed_hosts and _host_name(request.host) not in self._allowed_hosts:
            raise web.HTTPForbidden(text="unknown Host header\n")
        return await handler(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _verdict(self._health.unhealthy_because())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _verdict(self._health.not_ready_because())


def _verdict(reason: str | None) -> web.Response:
    if reason is None:
        return web.Response(text="ok\n")
    return web.Response(status=503, text=f"{reason}\n")


def _host_name(host: str) -> str:
    """The name in a Host header, without the port; IPv6 literals keep their brackets off."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
