"""Two pure ASGI layers around every route: who may come in, and the request's id and count."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.errors import ApiError, to_response
from paceline.server.metrics import Metrics

OPEN_PATHS = frozenset({"/health"})
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Auth:
    """Default deny: with keys set, every path but /health needs one of them, whether a route is there or not.

    Decides on `scope["path"]`, which is also what routing uses, and on no header but `Authorization`. Keeps only hashes
    of the keys; the hash of the key that came names the tenant (`scope["state"]["namespace"]`).
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._hashes or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        namespace = self._tenant(scope)
        if namespace is not None and scope["type"] == "http":
            scope.setdefault("state", {})["namespace"] = namespace
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = ApiError(
                401,
                "an API key is required, in the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await to_response(error)(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        """The hash of the key that came, if it is one of ours. Takes the same time whichever key matches, or none."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            return None
        scheme, _, token = values[0].partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        return digest.hex() if any(matches) and scheme.lower() == b"bearer" else None


class Edge:
    """Gives every request an id, in `scope["state"]` and in the answer's `x-request-id`, and counts the answers.

    A client's own id is taken when it is plain; it is never parsed or used for anything else.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, route_of: Callable[[str], str]) -> None:
        self._app = app
        self._metrics = metrics
        self._route_of = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = [value for name, value in scope["headers"] if name == b"x-request-id"]
        plain = len(sent) == 1 and REQUEST_ID.fullmatch(sent[0]) is not None
        id = sent[0] if plain else secrets.token_hex(16).encode()
        scope.setdefault("state", {})["request_id"] = id.decode()
        route = self._route_of(scope["path"])
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id)]
                self._metrics.answered(route, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if not started:
                self._metrics.answered(route, 500)
            raise
