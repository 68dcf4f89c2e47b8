"""The page at `/` of the daemon: static files, no build step, nothing from elsewhere.

    app = Starlette(routes=[*api_routes, *page_routes()])

The page talks to the daemon's own API as any other client does, so it needs no route but these.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No inline script or style, nothing from elsewhere, and in nobody's frame: a hostile text has nothing to reach for.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a newer daemon brings a newer page; the ETag keeps that cheap
}


def page_routes() -> list[Route]:
    """Return the routes of `/` and `/page/FILE`, for GET and HEAD."""
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in MEDIA_TYPES}

    async def index(request: Request) -> Response:  # noqa: ARG001 - Starlette's signature
        return _file(files[INDEX])

    async def asset(request: Request) -> Response:
        path = files.get(request.path_params["name"])
        return PlainTextResponse("no such file", status_code=404, headers=HEADERS) if path is None else _file(path)

    return [Route("/", index, methods=["GET"]), Route("/page/{name}", asset, methods=["GET"])]


def _file(path: Path) -> FileResponse:
    return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)
