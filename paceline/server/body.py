"""Reading a request body: bounded while it arrives, strict about what JSON is."""

import asyncio
import json
import time
from typing import Any

from fastapi import Request

from paceline.server.errors import ApiError, bad_request

READ_TIMEOUT = 60.0  # seconds for a whole body
MAX_KEYS = 4096  # of an object: more than any field takes


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the body of `request`, of at most `limit` bytes. When all of it has come is noted in the
    request's state as `arrival`.

    Raises `ApiError`: 415 for another content type, 413 over the limit, 408 when it does not arrive, 400 for what is
    not one strict JSON object in UTF-8 (no NaN, no duplicate key, no lone surrogate, no more than 4,096 keys).
    """
    _check_headers(request, limit)
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            body = await _read(request, limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_TIMEOUT:.0f} s", code="timeout") from None
    request.state.arrival = time.monotonic()
    return parse_object(body)


def _check_headers(request: Request, limit: int) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if charset not in ("", "utf-8", "utf8"):
        raise ApiError(415, "the body must be encoded in UTF-8")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "a compressed body is not supported")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client left before its request was complete")
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")


def parse_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object. Raises `ApiError` 400."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        if b"\\ud" in body or b"\\uD" in body:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(None, "a string of the body has a lone surrogate, which is not a character") from None
    except UnicodeDecodeError:
        raise bad_request(None, "the body is not valid UTF-8") from None
    except RecursionError:
        raise bad_request(None, "the JSON of the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(None, f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise bad_request(None, "the body must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys; at most {MAX_KEYS} are allowed")
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {ascii(twice[:80])} is there twice")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
