"""The real openai-python client against a real HTTP server: what it streams is what it gets whole."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from paceline.engine.tokenizer import Tokenizer
from paceline.server.app import ServerConfig
from tests.server.conftest import Server, in_thread, wait_for

pytestmark = pytest.mark.clients
MESSAGES: Any = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"stop": ["e", "\n"]},
    {"stop": "o", "n": 2},
    {"temperature": 0, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": -100}},
    {"user": "me", "extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}},
    {"extra_body": {"stop_token_ids": list(range(40, 90)), "include_stop_str_in_output": True}},
]


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Server]:
    with in_thread(tokenizer, ServerConfig(api_keys=("key",))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", timeout=30) as client:
        yield client


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("logprobs", [False, True])
def test_chat(client: openai.OpenAI, options: dict[str, Any], logprobs: bool) -> None:
    more = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "seed": 3, **options, **more}
    whole = client.chat.completions.create(**ask)
    text: dict[int, str] = {}
    logs: dict[int, list[Any]] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
            logs.setdefault(choice.index, []).extend(choice.logprobs.content or [] if choice.logprobs else [])
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert usage == whole.usage and len(whole.choices) == options.get("n", 1)
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content and reasons[choice.index] == choice.finish_reason
        assert choice.message.role == "assistant"
        assert logs[choice.index] == (choice.logprobs.content if choice.logprobs else [])
        assert bool(logs[choice.index]) == (logprobs and bool(choice.message.content or options.get("extra_body")))


@pytest.mark.parametrize("options", [*OPTIONS, {"echo": True}, {"echo": True, "n": 2}], ids=str)
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_completions(client: openai.OpenAI, options: dict[str, Any], logprobs: int | None) -> None:
    ask = {
        "model": "tiny",
        "prompt": ["hello", "grüße 😀"],
        "max_tokens": 30,
        "seed": 3,
        "logprobs": logprobs,
        **options,
    }
    whole = client.completions.create(**ask)
    text: dict[int, str] = {}
    logs: dict[int, list[Any]] = {}
    usage = None
    for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + choice.text
            if choice.logprobs:
                pairs = zip(
                    choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset, strict=True
                )
                logs.setdefault(choice.index, []).extend(pairs)
    assert usage == whole.usage and len(whole.choices) == 2 * options.get("n", 1)
    for choice in whole.choices:
        assert text[choice.index] == choice.text
        found = choice.logprobs
        assert (found is None) == (logprobs is None)
        if found is not None:
            assert logs.get(choice.index, []) == list(
                zip(found.tokens, found.token_logprobs, found.text_offset, strict=True)
            )


def test_a_seed_repeats(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> str:
        return client.completions.create(model="tiny", prompt="a", max_tokens=20, **more).choices[0].text

    assert ask(seed=4) == ask(seed=4) != ask(seed=5)


def test_models_and_errors(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", temperature=3)
    assert bad.value.param == "temperature"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_an_error_under_way_is_raised(client: openai.OpenAI, server: Server) -> None:
    server.fleet.fail_after = 2
    try:
        with pytest.raises(openai.APIError, match="the worker is gone"):
            for _ in client.completions.create(model="tiny", prompt="a", stream=True):
                pass
    finally:
        server.fleet.fail_after = None


def test_what_the_engine_failed_on_is_not_sent_again(client: openai.OpenAI, server: Server) -> None:
    server.fleet.fail_after, before = 0, len(server.fleet.submitted)
    try:
        with pytest.raises(openai.InternalServerError, match="the worker is gone"):
            client.completions.create(model="tiny", prompt="a")
    finally:
        server.fleet.fail_after = None
    assert len(server.fleet.submitted) == before + 1


def test_closing_a_stream_cancels(client: openai.OpenAI, server: Server) -> None:
    server.fleet.step_s = 0.02
    try:
        before = len(server.fleet.cancelled)
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, n=2)
        iterator = iter(stream)
        next(iterator)
        stream.close()
        wait_for(lambda: not server.fleet.running)
        assert len(server.fleet.cancelled) > before
    finally:
        server.fleet.step_s = 0.0


def test_the_client_waits_as_told_and_tries_again(server: Server) -> None:
    """Overload answers carry Retry-After, which the client obeys; a goal that cannot be met is not asked for again."""
    seen: list[str] = []
    submit = server.fleet.submit

    def refuse_once(*args: Any, **more: Any) -> str:
        seen.append("asked")
        if len(seen) == 1:
            server.fleet.capacity = 0
        try:
            return submit(*args, **more)
        finally:
            server.fleet.capacity = 10_000

    server.fleet.submit = refuse_once  # type: ignore[method-assign]
    waits: list[float] = []
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key") as client:
            client._sleep_for_retry = lambda **more: waits.append(  # type: ignore[method-assign, assignment]
                client._calculate_retry_timeout(1, more["options"], more["response"].headers)
            )
            client.completions.create(model="tiny", prompt="a")
    finally:
        server.fleet.submit = submit  # type: ignore[method-assign]
    assert len(seen) == 2 and waits == [7.0]
