"""A web server that hands out the files of a folder, as nginx or Caddy would."""

import asyncio
import datetime
import ipaddress
import ssl
import threading
from pathlib import Path
from typing import Self

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

TOKEN = "a-token-of-the-tests"


class WebServer:
    """Serves a folder at ``/kv`` until the block ends, or `stop` is called."""

    def __init__(
        self, folder: Path, port: int = 0, token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        self._token = token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        folder.mkdir(exist_ok=True)
        application = web.Application(middlewares=[self._admit])
        application.router.add_static("/kv", folder)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.0)
        self.port = asyncio.run_coroutine_threadsafe(self._start(port, tls), self._loop).result()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}/kv"

    @web.middleware
    async def _admit(self, request: web.Request, handler: object) -> web.StreamResponse:
        if self._token and request.headers.get("Authorization") != f"Bearer {self._token}":
            raise web.HTTPUnauthorized
        return await handler(request)  # type: ignore[operator,no-any-return]

    async def _start(self, port: int, tls: ssl.SSLContext | None) -> int:
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls)
        await self._site.start()
        return int(self._runner.addresses[0][1])

    async def _end(self) -> None:
        # Connections that are being accepted or closed take some turns of the loop each.
        await self._site.stop()
        await asyncio.sleep(0.01)
        await self._runner.cleanup()
        await asyncio.sleep(0.01)

    def stop(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate for 127.0.0.1 and its key; return both paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
