"""The edge: keys, paths, ids, sizes, and one envelope for every error."""

import asyncio
import hashlib
import hmac
import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.api import Rejected
from paceline.server import errors, middleware, streaming
from paceline.server.app import ServerConfig, create_app
from tests.server.conftest import Server, build, in_process, in_thread
from tests.server.test_protocol import check_envelope

KEYS = ServerConfig(api_keys=("secret-1", "secret-2"))


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        for method in route.methods:  # type: ignore[attr-defined]
            yield method, route.path.replace("{model:path}", "tiny")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": "secret-1"},
        {"authorization": "Basic secret-1"},
        {"authorization": "Bearer secret-1 secret-2"},
        {"authorization": "Bearer SECRET-1"},
        {"x-api-key": "secret-1"},
        [("authorization", "Bearer secret-1"), ("authorization", "Bearer secret-1")],
        {"authorization": "Bearer " + hashlib.sha256(b"secret-1").hexdigest()},
    ],
)
async def test_every_route_without_a_key_is_401(tokenizer: Tokenizer, headers: Any) -> None:
    async with in_process(tokenizer, KEYS) as server:
        walked = [*routes(server.app), ("GET", "/nope"), ("GET", "/"), ("POST", "/docs"), ("OPTIONS", "/v1/models")]
        assert {"/metrics", "/openapi.json", "/v1/completions", "/tokenizer_info"} <= {path for _, path in walked}
        for method, path in walked:
            answer = await server.client.request(method, path, headers=headers)
            if path == "/health":
                assert answer.status_code == (200 if method == "GET" else 405)
                continue
            assert answer.status_code == 401, (method, path)
            if method != "HEAD":
                assert check_envelope(answer.json())["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("value", ["Bearer secret-1", "bearer secret-2", "BEARER  secret-1 "])
async def test_a_key_opens_every_route(tokenizer: Tokenizer, value: str) -> None:
    async with in_process(tokenizer, KEYS) as server:
        for method, path in routes(server.app):
            answer = await server.client.request(method, path, headers={"authorization": value})
            assert answer.status_code != 401
        answer = await server.client.get("/nope", headers={"authorization": value})
        assert answer.status_code == 404


async def test_no_key_is_needed_where_none_is_set(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        assert (await server.client.get("/v1/models")).status_code == 200


HOSTS = ["/health", "x/health", "localhost/health?", "a@b/health", "x#/health", "", "[::1", "\x7f", "x" * 3000]
TARGETS = """
    /%76%31/models //v1/models /v1//models /health/../v1/models /health/%2e%2e/v1/models /v1/models/ /v1/models?/health
    /v1/models;/health /health%2f..%2fv1%2fmodels /health/ /HEALTH /health%00 /%2e/v1/models /health%20 /health;x
    /v1/models%3f/health /metrics/. http://x/v1/models * /health\\..\\v1/models /v1/completions#/health /./metrics
    //health /%2fhealth /%ff%fe
"""
TRICKS = ["X-Forwarded-Path: /health", "X-Original-URL: /health", "X-Rewrite-URL: /health", "Forwarded: host=health"]
UPGRADE = ["Upgrade: websocket", "Connection: Upgrade"]


def test_hosts_and_encoded_paths_do_not_open_doors(tokenizer: Tokenizer) -> None:
    """Over raw sockets: no request line and no Host gets past the keys."""
    with in_thread(tokenizer, KEYS) as server:
        for host in HOSTS:
            for path in ("/v1/models", "/metrics", "/openapi.json"):
                assert raw(server, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n")[0] in (400, 401)
        for target in TARGETS.split():
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                status, body = raw(server, f"{method} {target} HTTP/1.1\r\nHost: x\r\n")
                assert status in (400, 401), (method, target, status, body)
        for headers in (TRICKS, UPGRADE):
            assert raw(server, "\r\n".join(["GET /v1/models HTTP/1.1", "Host: x", *headers, ""]))[0] == 401
        assert raw(server, "GET http://x/health HTTP/1.1\r\nHost: y\r\n")[0] == 200


def raw(server: Server, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Sends bytes as they are; gives the status and the rest."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as sock:
        sock.sendall(head.encode("latin-1") + b"Connection: close\r\n\r\n" + body)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 "), answer
    return int(answer[9:12]), answer.partition(b"\r\n\r\n")[2]


async def test_keys_are_hashed_and_compared_in_constant_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(middleware, "hmac", type("Recorder", (), {"compare_digest": staticmethod(compare)}))
    async with in_process(tokenizer, KEYS) as server:
        await server.client.get("/v1/models", headers={"authorization": "Bearer secret-1"})
    digests = [hashlib.sha256(key.encode()).digest() for key in KEYS.api_keys]
    assert compared == [(digests[0], digests[0]), (digests[0], digests[1])]  # both, though the first one matched
    auth = middleware.Auth(server.app, KEYS.api_keys)
    assert "secret" not in repr(vars(auth))


async def test_a_websocket_is_turned_away(tokenizer: Tokenizer) -> None:
    server = build(tokenizer, KEYS)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/models", "headers": [], "query_string": b"", "subprotocols": []}
    await server.app(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("keys", [("",), (" a",), ("a\n",), ("é",)])
def test_keys_that_no_header_can_carry_are_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="api_keys"):
        ServerConfig(api_keys=keys)


def test_bad_settings_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="metrics_compat"):
        ServerConfig(metrics_compat="sglang")
    with pytest.raises(ValueError, match="models"):
        create_app(build(tokenizer).fleet, {}, ServerConfig())


@pytest.mark.parametrize("id", ["a", "A-b_c.9", "x" * 64])
async def test_a_plain_request_id_comes_back(tokenizer: Tokenizer, id: str) -> None:
    async with in_process(tokenizer) as server:
        for path in ("/health", "/nope"):
            assert (await server.client.get(path, headers={"x-request-id": id})).headers["x-request-id"] == id


@pytest.mark.parametrize("id", ["", "x" * 65, "a b", "http://evil/", "a\tb", "é", "a;b", "../x", "a\n"])
async def test_any_other_request_id_is_replaced(tokenizer: Tokenizer, id: str) -> None:
    async with in_process(tokenizer) as server:
        answer = await server.client.get("/health", headers={"x-request-id": id.encode("latin-1")})
        assert answer.headers["x-request-id"] != id and len(answer.headers["x-request-id"]) == 32


async def test_routes_that_are_not_there(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        for method, path, status in (
            ("GET", "/nope", 404),
            ("GET", "/v1/models/", 404),
            ("GET", "/docs", 404),
            ("GET", "/redoc", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models/unknown", 404),
            ("GET", "/tokenizer_info?model=unknown", 404),
            ("GET", "/v1/models/%ED%A0%80", 404),
        ):
            answer = await server.client.request(method, path)
            assert answer.status_code == status, path
            check_envelope(answer.json())


async def test_a_fault_of_ours_is_an_envelope_too(tokenizer: Tokenizer) -> None:
    server = build(tokenizer)
    server.fleet.submit = lambda *args, **more: 1 / 0  # type: ignore[method-assign]
    transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 500
        assert "division" not in answer.text and check_envelope(answer.json())["code"] == "internal_error"
        assert answer.headers["x-should-retry"] == "false"


def test_a_goal_that_cannot_be_met_is_429() -> None:
    error = errors.from_rejection(Rejected("the deadline cannot be met"))
    assert (error.status, error.headers) == (429, {"x-should-retry": "false"})


# Sizes

SMALL = ServerConfig(max_body_bytes=1000)
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_large_body_is_413(tokenizer: Tokenizer, path: str) -> None:
    async with in_process(tokenizer, SMALL) as server:
        headers = {"content-type": "application/json"}
        answer = await server.client.post(path, content=b" " * 1001, headers=headers)
        assert answer.status_code == 413 and check_envelope(answer.json())["code"] == "request_too_large"
        answer = await server.client.post(path, content=b" " * 1000, headers=headers)
        assert answer.status_code == 400

        async def pieces() -> Any:
            for _ in range(100):
                yield b" " * 100

        answer = await server.client.post(path, content=pieces(), headers=headers)
        assert answer.status_code == 413


def test_a_chunked_body_is_bounded_while_it_arrives(tokenizer: Tokenizer) -> None:
    """The answer comes before the body is complete, and without memory for it."""
    with in_thread(tokenizer, SMALL) as server:
        parts = urlsplit(server.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("transfer-encoding", "chunked")
        connection.endheaders()
        for _ in range(3):
            connection.send(b"200\r\n" + b" " * 0x200 + b"\r\n")
        answer = connection.getresponse()
        assert answer.status == 413 and check_envelope(json.loads(answer.read()))
        connection.close()
        declared = (
            f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {10**15}\r\n"
        )
        assert raw(server, declared)[0] == 413
        assert server.client.get("/health").status_code == 200


async def test_a_body_that_never_ends_is_408(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.body.READ_TIMEOUT", 0.02)
    async with in_process(tokenizer) as server:

        async def pieces() -> Any:
            yield b"{"
            await asyncio.sleep(30)

        answer = await server.client.post(
            "/v1/completions", content=pieces(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 408


async def test_tokens_there_and_back(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        text = "grüße, 世界 😀"
        body = {"model": "tiny", "prompt": text, "add_special_tokens": False, "return_token_strs": True}
        answer = (await server.client.post("/tokenize", json=body)).json()
        assert answer["tokens"] == tokenizer.encode(text, False) and answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 256 and len(answer["token_strs"]) == answer["count"]
        back = (await server.client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert back == {"prompt": text}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        tokens = (await server.client.post("/tokenize", json=chat)).json()["tokens"]
        assert tokenizer.decode(tokens, False) == "<|user|>hi\n<|assistant|>"
        info = (await server.client.get("/tokenizer_info")).json()
        assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("</s>", "<s>", None)
        assert info["chat_template"] == tokenizer.chat_template


async def test_the_event_loop_goes_on_beside_long_texts(tokenizer: Tokenizer) -> None:
    texts = ["hello 世界 " * 12] * 250  # each is short
    ids = tokenizer.encode("".join(texts), True)
    bodies = [
        ("/tokenize", {"prompt": "".join(texts), "return_token_strs": True}),
        ("/detokenize", {"tokens": ids * 8}),
        ("/v1/completions", {"prompt": texts, "max_tokens": 1}),
    ]
    async with in_process(tokenizer) as server:
        for path, body in bodies:
            most = 0
            for _ in range(3):  # once the loop itself may have had no core for the few milliseconds that it takes
                asked, turns = asyncio.create_task(server.client.post(path, json=body)), 0
                while not asked.done():
                    turns += 1
                    await asyncio.sleep(0)
                answer = (await asked).json()
                assert answer.get("count", len(ids)) == len(ids)
                most = max(most, turns)
            assert most > 50, path


@pytest.mark.parametrize("stream", [False, True])
async def test_the_event_loop_goes_on_beside_answers_of_many_numbers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    turns, within = 0, []

    def encode(reply: Any, known: Any = streaming._encode) -> bytes:
        before = turns
        time.sleep(0.02)
        within.append(turns - before)
        return known(reply)

    monkeypatch.setattr(streaming, "_encode", encode)
    async with in_process(tokenizer) as server:
        for size, goes_on in (4, False), (200, True):
            body = {"prompt": [[5] * size] * 2, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": stream}
            asked = asyncio.create_task(server.client.post("/v1/completions", json=body))
            within.clear()
            while not asked.done():
                turns += 1
                await asyncio.sleep(0)
            assert (await asked).status_code == 200 and (max(within) > 0) is goes_on


async def test_there_is_an_end_to_the_log_probabilities_of_a_request(tokenizer: Tokenizer) -> None:
    body = {"prompt": [[5] * 250] * 200, "echo": True, "logprobs": 20, "max_tokens": 0}
    async with in_process(tokenizer) as server:
        answer = await server.client.post("/v1/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("logprobs: with echo")
        assert (await server.client.post("/v1/completions", json=body | {"logprobs": 0})).status_code == 200


async def test_what_must_be_too_long_is_not_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("encoded"))
    text = "x" * 256 * 14  # bytes of the longest token
    async with in_process(tokenizer) as server:
        for path, body in [
            ("/v1/completions", {"prompt": ["a", text + "x"]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/tokenize", {"prompt": "x" * (2**20 + 1)}),
        ]:
            answer = await server.client.post(path, json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] in ("prompt.1", "messages", "prompt"), error


async def test_the_list_of_models(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        models = (await server.client.get("/v1/models")).json()
        assert models["object"] == "list" and [card["id"] for card in models["data"]] == ["tiny"]
        assert (await server.client.get("/v1/models/tiny")).json() == models["data"][0]
        assert models["data"][0]["max_model_len"] == 256 and models["data"][0]["object"] == "model"
        assert "version" in (await server.client.get("/version")).json()
