"""Pages of other sites that may use the API, as browsers ask for it (CORS)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response

from outrider.edge.daemon import ANY
from outrider.edge.daemon.errors import ApiError

METHODS = "GET, POST, DELETE"
READABLE = "X-Request-Id, X-Outrider-Ignored, Retry-After"  # besides what scripts may read of any answer
PREFLIGHT_HOLDS_S = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_\-, ]{1,2000}")


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins whose pages may use the API besides the daemon's own page.

    Attributes:
        allowed: origins, or `*` for all of them, which is for daemons that ask for keys.
    """

    allowed: tuple[str, ...] = ()

    def check(self, headers: Headers, *, is_open: bool) -> None:
        """Let in what no page of another site has sent, and pages that are allowed; a link may lead to an open path.

        Raises:
            ApiError: 403 it comes from another site.
        """
        origin = headers.get("origin")
        if origin is None:
            elsewhere = not is_open and headers.get("sec-fetch-site") in ("cross-site", "same-site")
        else:
            own = origin.partition("://")[2].lower() == headers.get("host", "").lower()
            elsewhere = not own and not self._allows(origin)
        if elsewhere:
            message = "pages from elsewhere may not use this API; start the daemon with --allow-origin for their origin"
            raise ApiError(403, message, code="origin_not_allowed")

    def headers_for(self, headers: Headers) -> dict[str, str]:
        """Return the headers by which a browser lets a page of another site read an answer."""
        if not self.allowed:
            return {}
        origin = headers.get("origin", "")
        if not self._allows(origin):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": READABLE,
            "Vary": "Origin",
        }

    def preflight(self, method: str, headers: Headers) -> Response | None:
        """Answer a browser's question before a request of an allowed page; None: it is no such question.

        Keys come with the request itself. No cookies exist, so none are allowed.
        """
        wanted = headers.get("access-control-request-headers", "")
        asked = method == "OPTIONS" and "access-control-request-method" in headers
        if not asked or not self._allows(headers.get("origin", "")):
            return None
        allowed = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(PREFLIGHT_HOLDS_S)}
        if _HEADER_NAMES.fullmatch(wanted):
            allowed["Access-Control-Allow-Headers"] = wanted  # clients send whatever names they like
        if headers.get("access-control-request-private-network") == "true":
            allowed["Access-Control-Allow-Private-Network"] = "true"  # a public site to an address of this network
        return Response(status_code=204, headers=allowed)

    def _allows(self, origin: str) -> bool:
        return bool(origin) and (ANY in self.allowed or origin.lower() in map(str.lower, self.allowed))
