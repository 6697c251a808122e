"""`paceline chat`: a conversation with a running server, streamed."""

import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from errno import EPROTO
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from paceline.cli.ask import bearer, failed


def chat(
    message: Annotated[
        str | None, typer.Argument(help="Say this once and leave; without it, a conversation until Ctrl-D.")
    ] = None,
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the server's first model.")] = None,
    api_key: Annotated[str, typer.Option(envvar="PACELINE_API_KEY", help="If the server wants one.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.7,
) -> None:
    """Chat with a running server.

    Example: paceline chat "def fibonacci(n):" --max-tokens 64
    """
    client = Client(url, api_key)
    model = model or client.models()[0]
    history: list[dict[str, str]] = []
    console = Console(stderr=True)
    if not message:
        console.print(f"{model} at {url}; Ctrl-D ends", style="dim", markup=False, highlight=False, soft_wrap=True)
    while (line := message or _ask()) is not None:
        if not line:
            continue
        history.append({"role": "user", "content": line})
        answer = []
        request = {"model": model, "messages": history, "max_tokens": max_tokens, "temperature": temperature}
        for piece in client.stream(request):
            answer.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        history.append({"role": "assistant", "content": "".join(answer)})
        if message:
            return


def _ask() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


class Client:
    """As much of the OpenAI API as a chat needs."""

    def __init__(self, url: str, api_key: str) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ValueError(f"url: {url!r} is not like http://HOST:PORT: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError(f"url: {url!r} is not like http://HOST:PORT")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect = lambda: kind(host, port, timeout=600)
        self._url, self._prefix = url, parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | bearer(api_key)

    def models(self) -> list[str]:
        with self._send("GET", "/v1/models") as response:
            try:
                found = [str(model["id"]) for model in json.load(response)["data"]]
            except (ValueError, KeyError, TypeError):
                found = []
        if not found:
            raise ValueError(f"url: no list of models at {self._url}")
        return found

    def stream(self, request: dict[str, object]) -> Iterator[str]:
        """Text of the answer, piece by piece."""
        with self._send("POST", "/v1/chat/completions", request | {"stream": True}) as response:
            for line in self._lines(response):
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    return
                if not data:
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise OSError(EPROTO, chunk["error"]["message"], self._url)
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""
        raise self._cut()

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise self._cut() from error

    def _cut(self) -> OSError:
        return OSError(EPROTO, "the server went away in the middle of an answer", self._url)

    @contextmanager
    def _send(self, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        with closing(self._connect()) as connection:
            try:
                connection.request(method, self._prefix + path, json.dumps(body) if body else None, self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ValueError(f"url: no server answers at {self._url}: {error}") from error
            if response.status != 200:
                try:
                    reason = json.load(response)["error"]["message"]
                except (ValueError, KeyError, TypeError):
                    reason = response.reason
                text = f"the server says {response.status}: {reason}"
                raise OSError(EPROTO, text, self._url) if failed(response.status) else ValueError(text)
            yield response
