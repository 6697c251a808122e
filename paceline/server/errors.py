"""The one shape of every error answer: OpenAI's envelope, and the exceptions that become it."""

import math
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from paceline.runtime.api import GoalUnreachable, Overloaded, Rejected, TooLong, Unavailable

NOT_AGAIN = {"x-should-retry": "false"}  # to OpenAI's clients
RETRY_S = 5  # where nobody can say when it would be worth while

STATUS_TEXT = {
    404: "there is no such route",
    405: "the method is not allowed on this route",
    500: "the server failed on this request",
}


class ApiError(Exception):
    """An error answer: HTTP status, a message for people, and OpenAI's `param` and `code` for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def envelope(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        """The envelope as JSON. Text that is no Unicode (a lone surrogate from a header or a query) is replaced."""
        try:
            return msgspec.json.encode(self.envelope())
        except UnicodeEncodeError:
            self.message = self.message.encode("utf-8", "replace").decode("utf-8")
            return msgspec.json.encode(self.envelope())


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: a fault of the request. The message names the field first."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def model_not_found(name: str, known: list[str]) -> ApiError:
    shown = name if len(name) <= 100 else name[:100] + "..."
    message = f"model: there is no model {shown!r}; this server has {', '.join(known)}"
    return ApiError(404, message, param="model", code="model_not_found")


def engine_error(reason: str) -> ApiError:
    """500: the engine lost a sequence. OpenAI's client would send it again, and it may be what breaks the engine."""
    return ApiError(500, reason or "the engine failed on this request", code="engine_error", headers=NOT_AGAIN)


def from_rejection(error: Rejected) -> ApiError:
    """What a client is told when the fleet does not take its request."""
    if isinstance(error, TooLong):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, Overloaded | Unavailable):
        code = "overloaded" if isinstance(error, Overloaded) else "unavailable"
        after = error.retry_after
        headers = NOT_AGAIN if after is None else {"retry-after": str(max(1, math.ceil(after)))}
        return ApiError(503, str(error), code=code, headers=headers)
    headers = NOT_AGAIN.copy()
    if isinstance(error, GoalUnreachable):
        first, late = error.what == "ttft", error.expected - error.goal
        headers["retry-after"] = str(max(1, math.ceil(late)) if first else RETRY_S)
        name, digits = ("ttft", 0) if first else ("tpot", 1)
        headers[f"x-predicted-{name}-ms"] = f"{1e3 * error.expected:.{digits}f}"
    return ApiError(429, str(error), code="slo_unreachable", headers=headers)


def to_response(error: ApiError) -> Response:
    return Response(error.encode(), error.status, headers=error.headers, media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return to_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = STATUS_TEXT.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return to_response(ApiError(error.status_code, text, code=code, headers=dict(error.headers or {})))


async def _on_failure(request: Request, error: Exception) -> Response:
    """A fault of ours. Starlette raises it again after the answer, so that it is logged with its traceback."""
    headers = {"x-request-id": request.state.request_id} if hasattr(request.state, "request_id") else {}
    return to_response(ApiError(500, STATUS_TEXT[500], code="internal_error", headers=headers | NOT_AGAIN))


def install(app: FastAPI) -> None:
    """Makes every error of `app` an envelope."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_failure)
