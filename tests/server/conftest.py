"""A small real tokenizer, a fake fleet, and servers over them."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.engine.tokenizer import Tokenizer
from paceline.server.app import ServedModel, ServerConfig, create_app
from tests.server.fake_fleet import FakeFleet

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = [
    "def hello(self, name): return f'hello {name}'",
    "the quick brown fox jumps over the lazy dog " * 4,
    "import os, sys; print('grüße, 世界, 😀')",
]
CONTEXT = 256
DECODER = {"tiny": None}


def make_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Byte-level BPE of some 350 tokens, so that most characters beyond ASCII are split over tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens=special, chat_template=template)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@dataclass
class Server:
    """An app over a fake fleet, reachable with `client` (in process) or at `url` (real HTTP)."""

    fleet: FakeFleet
    app: FastAPI
    tokenizer: Tokenizer
    client: Any = None
    url: str = ""


def build(
    tokenizer: Tokenizer, config: ServerConfig | None = None, models: Mapping[str, int | None] = DECODER, **fleet: Any
) -> Server:
    """models: by name, how many numbers embeddings have; None: it generates."""
    contexts = {name: CONTEXT for name in models}
    encoders = [name for name, dimensions in models.items() if dimensions]
    fake = FakeFleet(contexts, tokenizer.vocab_size, tokenizer.eos_ids, encoders=encoders, **fleet)
    served = {name: ServedModel(name, tokenizer, CONTEXT, 1, None, dimensions) for name, dimensions in models.items()}
    return Server(fake, create_app(fake, served, config or ServerConfig()), tokenizer)


@asynccontextmanager
async def in_process(tokenizer: Tokenizer, config: ServerConfig | None = None, **fleet: Any) -> AsyncIterator[Server]:
    """The app called directly, through httpx."""
    server = build(tokenizer, config, **fleet)
    async with server.app.router.lifespan_context(server.app):
        transport = httpx.ASGITransport(server.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            server.client = client
            yield server


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def in_thread(tokenizer: Tokenizer, config: ServerConfig | None = None, **fleet: Any) -> Iterator[Server]:
    """The app behind a real uvicorn in a thread."""
    server = build(tokenizer, config, **fleet)
    port = free_port()
    options: dict[str, Any] = {"log_level": "error", "access_log": False, "ws": "none", "http": "httptools"}
    runner = uvicorn.Server(uvicorn.Config(server.app, port=port, **options))
    thread = threading.Thread(target=lambda: asyncio.run(runner.serve()), daemon=True)
    thread.start()
    wait_for(lambda: runner.started)
    server.url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=server.url, timeout=30) as client:
        server.client = client
        yield server
    runner.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Polls until `condition` holds; fails after `seconds`."""
    event = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        event.wait(0.005)
    raise AssertionError("the condition never held")


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """`wait_for` inside an event loop."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Server]:
    """One real server for the tests of a module that leave it as it was."""
    with in_thread(tokenizer) as server:
        yield server
