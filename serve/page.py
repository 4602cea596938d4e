"""The page at `/`: three files and an icon beside this module, served from memory.

Owns what is served and with which headers. The page talks to the API like any other client; it needs no build step and
fetches nothing from elsewhere, which its content security policy enforces.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

FOLDER = Path(__file__).parent / "console"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page holds an API key and shows untrusted text: nothing foreign may run in it, and nobody may frame it."""


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str  # strong: a hash of the body

    @classmethod
    def read(cls, path: Path) -> Asset:
        """Read a file whose ending is one of the page's."""
        body = path.read_bytes()
        return cls(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    def response(self, request: Request) -> Response:
        """The file, or 304 if the client has it: clients keep it, and ask each time whether it is still the one."""
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-cache", "ETag": self.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def page_router() -> APIRouter:
    """Routes for `/` and `/console/...`; the files are read once, here.

    Links in the page are relative, so that it works under any route prefix that ends with a slash.
    """
    router = APIRouter(include_in_schema=False)
    assets = {path.name: Asset.read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES}
    index = assets.pop("index.html")

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return index.response(request)

    @router.api_route("/console/{name}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            return Response("The page has no such file.\n", status_code=404, media_type="text/plain")
        return assets[name].response(request)

    return router
