"""Server-sent events, rule by rule, and that a stream says what the whole answer says."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.request import SamplingParams
from paceline.core.work import SliceOutput, TokenLogprobs
from paceline.engine.tokenizer import Tokenizer
from paceline.server.generation import Generation, Job, Prompt, TextOptions
from paceline.server.metrics import Metrics
from paceline.server.replies import CompletionDetails, Usage
from paceline.server.streaming import usage_of
from tests.server.conftest import in_process, make_tokenizer
from tests.server.fake_fleet import FakeFleet

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 5}
COMPLETION = {"prompt": "hello", "max_tokens": 12, "seed": 5}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
TOKENIZER = make_tokenizer()


def events(text: str) -> list[str]:
    """The data of each event; every event is one `data: ` line and an empty one."""
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def stream(client: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert found[-1] == "[DONE]" and found.count("[DONE]") == 1
    return [json.loads(event) for event in found[:-1]]


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("n", [1, 3])
async def test_finish_reasons(tokenizer: Tokenizer, path: str, body: dict[str, Any], n: int) -> None:
    """null until the end, and exactly one finish chunk per choice, its last."""
    async with in_process(tokenizer) as server:
        chunks = await stream(server.client, path, {**body, "n": n})
        reasons: dict[int, list[str | None]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                assert "finish_reason" in choice
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
        assert sorted(reasons) == list(range(n))
        for found in reasons.values():
            assert found[-1] == "length" and set(found[:-1]) == {None}


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_all_chunks_have_one_head(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async with in_process(tokenizer) as server:
        chunks = await stream(server.client, path, {**body, "n": 2})
        assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1
        assert chunks[0]["object"] == ("chat.completion.chunk" if "chat" in path else "text_completion")
        assert chunks[0]["model"] == "tiny"


async def test_the_first_chat_chunk_of_a_choice_has_the_role(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        chunks = await stream(server.client, "/v1/chat/completions", {**CHAT, "n": 3})
        roles = Counter()
        seen: set[int] = set()
        for chunk in chunks:
            for choice in chunk["choices"]:
                if choice["index"] not in seen:
                    assert choice["delta"] == {"role": "assistant", "content": ""}
                    seen.add(choice["index"])
                roles[choice["index"]] += "role" in choice["delta"]
        assert roles == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_usage_comes_when_asked_for(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async with in_process(tokenizer) as server:
        for options in (None, {}, {"include_usage": False}):
            chunks = await stream(server.client, path, {**body, "stream_options": options})
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
        chunks = await stream(server.client, path, {**body, "n": 2, "stream_options": {"include_usage": True}})
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 24
        whole = (await server.client.post(path, json={**body, "n": 2})).json()
        assert whole["usage"] == chunks[-1]["usage"]
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await stream(server.client, path, {**body, "stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and set(counts) >= {1, 6, 12} and counts[-1] == 12
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {whole["usage"]["prompt_tokens"]}
        chunks = await stream(server.client, path, {**body, "stream_options": {"continuous_usage_stats": True}})
        assert all("usage" not in chunk for chunk in chunks)


async def test_what_is_ready_goes_out_together(tokenizer: Tokenizer) -> None:
    """Several tokens of one step are one chunk."""
    async with in_process(tokenizer) as server:
        server.fleet.tokens_per_step = 4
        chunks = await stream(server.client, "/v1/completions", COMPLETION)
        assert len(chunks) == 3


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_an_error_under_way_is_the_last_event(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async with in_process(tokenizer) as server:
        server.fleet.fail_after = 3
        answer = await server.client.post(path, json={**body, "stream": True, "n": 2})
        found = events(answer.text)
        assert "[DONE]" not in found and len(found) > 1
        error = json.loads(found[-1])["error"]
        assert error["message"] == "the worker is gone" and error["type"] == "server_error"
        whole = await server.client.post(path, json=body)
        assert whole.status_code == 500 and whole.json()["error"] == error
        assert not server.fleet.running


MORE = [
    {},
    {"n": 3},
    {"stop": ["e"]},
    {"stop": ["he", " q", "()"], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(20, 60))},
    {"stop_token_ids": list(range(20, 60)), "include_stop_str_in_output": True},
    {"temperature": 0, "n": 2},
    {"skip_special_tokens": False, "ignore_eos": True},
]


@pytest.mark.parametrize("tokens_per_step", [1, 5])
@pytest.mark.parametrize("more", MORE, ids=str)
async def test_a_stream_says_what_the_whole_answer_says(
    tokenizer: Tokenizer, more: dict[str, Any], tokens_per_step: int
) -> None:
    async with in_process(tokenizer) as server:
        server.fleet.tokens_per_step = tokens_per_step
        for path, body in ROUTES:
            for seed in range(5):
                for extra in ({}, {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}):
                    await _compare(server.client, path, {**body, **more, **extra, "seed": seed, "max_tokens": 40})
            await _compare(server.client, "/v1/completions", {**COMPLETION, **more, "echo": True, "logprobs": 1})
            await _compare(
                server.client, "/v1/completions", {**COMPLETION, **more, "prompt": [[7], [5, 6]], "echo": True}
            )


async def _compare(client: Any, path: str, body: dict[str, Any]) -> None:
    whole = (await client.post(path, json=body)).json()
    chunks = await stream(client, path, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"] == whole["usage"]
    found = texts(chunks)
    last = {c["index"]: c for chunk in chunks for c in chunk["choices"]}
    for choice in whole["choices"]:
        i = choice["index"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert found[i] == text
        assert last[i]["finish_reason"] == choice["finish_reason"]
        assert last[i]["stop_reason"] == choice["stop_reason"]
        logs = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == i and c["logprobs"]]
        if choice["logprobs"] is None:
            assert not logs
            continue
        for key in ("content",) if "content" in choice["logprobs"] else ("tokens", "text_offset", "top_logprobs"):
            assert [entry for log in logs for entry in log[key]] == choice["logprobs"][key]


# The sink, without a server


def generate(
    tokens: list[int], cuts: list[int], options: TextOptions, logprobs: int | None = None, finish: str = "length"
) -> tuple[str, Generation]:
    """Pushes `tokens` in pieces cut at `cuts`, taking after each; gives the text and the generation."""
    fleet = FakeFleet({"tiny": 1000}, 300)
    params = SamplingParams(max_tokens=len(tokens), logprobs=logprobs)
    job = Job("tiny", TOKENIZER, [Prompt([5])], 1, params, options)
    generation = Generation(fleet, job, Metrics())
    choice, text, entries = generation.choices[0], "", []
    bounds = sorted({0, *(cut % (len(tokens) + 1) for cut in cuts), len(tokens)})
    for start, end in zip(bounds, bounds[1:], strict=False):
        ids = tokens[start:end]
        logs = [fleet.logprob(token, logprobs) for token in ids] if logprobs is not None else []
        done = choice.push(SliceOutput(ids, logs), finish if end == len(tokens) else None)
        piece = choice.take()
        text += piece.text
        entries += piece.entries
        if done:
            break
    choice.kept = entries  # type: ignore[attr-defined]
    return text, generation


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="abc🙂é\n", min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="abc🙂é\n", min_size=1, max_size=4), max_size=3, unique=True),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    include=st.booleans(),
    logprobs=st.sampled_from([None, 2]),
)
def test_stop_strings_cut_the_text_wherever_tokens_end(
    text: str, stops: list[str], cuts: list[int], include: bool, logprobs: int | None
) -> None:
    tokens = TOKENIZER.encode(text, False)
    found, generation = generate(tokens, cuts, TextOptions(tuple(stops), include), logprobs)
    choice = generation.choices[0]
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert (found, choice.finish_reason, choice.stop_reason) == (text, "length", None)
        assert choice.completion_tokens == len(tokens)
        return
    end, _, stop = min(ends)
    assert choice.finish_reason == "stop" and choice.stop_reason == stop
    assert found == (text[:end] if include else text[: end - len(stop)])
    through = next(i for i in range(len(tokens) + 1) if len(decoded(tokens[:i])) >= end)
    assert choice.completion_tokens == through
    if logprobs is not None:
        kept = choice.kept  # type: ignore[attr-defined]
        assert all(entry.offset < len(found) for entry in kept)
        assert [entry.token for entry in kept] == tokens[: len(kept)]
        assert not found or len(decoded(tokens[: len(kept)])) >= len(found)


def decoded(tokens: list[int]) -> str:
    """The text that is complete after these tokens."""
    return b"".join(map(TOKENIZER.token_bytes, tokens)).decode("utf-8", "ignore")


def test_a_stop_token_is_not_text_but_counts() -> None:
    tokens = TOKENIZER.encode("hello name", False)
    fleet = FakeFleet({"tiny": 100}, 300)
    for include, text in ((False, "hello"), (True, "hello name")):
        params = SamplingParams(max_tokens=9, stop_token_ids=(tokens[-1],), logprobs=0)
        job = Job("tiny", TOKENIZER, [Prompt([5])], 1, params, TextOptions(include_stop=include))
        choice = Generation(fleet, job, Metrics()).choices[0]
        assert len(tokens) == 2
        choice.push(SliceOutput(tokens, [fleet.logprob(token, 0) for token in tokens]), "stop")
        piece = choice.take()
        assert (piece.text, piece.finish_reason, choice.stop_reason) == (text, "stop", tokens[-1])
        assert choice.completion_tokens == 2 and len(piece.entries) == 2


@pytest.mark.parametrize(("stops", "taken", "accepted"), [(("name",), 2, 2), (("namehello",), 3, 3), ((), 6, 5)])
def test_what_was_accepted_behind_a_stop_string_is_not_of_the_answer(
    stops: tuple[str, ...], taken: int, accepted: int
) -> None:
    tokens = TOKENIZER.encode("hello name" * 3, False)
    job = Job("tiny", TOKENIZER, [Prompt([5])], 1, SamplingParams(max_tokens=9), TextOptions(stops))
    generation = Generation(FakeFleet({"tiny": 100}, 300), job, Metrics())
    assert len(tokens) == 6
    assert generation.choices[0].push(SliceOutput(tokens, num_draft=7, num_accepted=5), None) == bool(stops)
    usage = usage_of(generation)
    assert usage == Usage(1, taken, 1 + taken, CompletionDetails(accepted, 7 - accepted))


def test_the_end_of_sequence_gives_no_stop_reason() -> None:
    text, generation = generate([*TOKENIZER.encode("hello", False), 1], [], TextOptions(), finish="stop")
    assert text == "hello" and generation.choices[0].stop_reason is None


def test_an_unfinished_character_waits_and_is_replaced_at_the_end() -> None:
    tokens = [
        t
        for byte in "世".encode()[:2]
        for t in range(TOKENIZER.vocab_size)
        if TOKENIZER.token_bytes(t) == bytes([byte])
    ]
    text, generation = generate(tokens, [1], TextOptions(), logprobs=0)
    assert text == "�" and [entry.offset for entry in generation.choices[0].kept] == [0, 0]  # type: ignore[attr-defined]


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    tokens = TOKENIZER.encode("hello hello", False)
    fleet = FakeFleet({"tiny": 100}, 300)
    job = Job("tiny", TOKENIZER, [Prompt([5])], 1, SamplingParams(min_tokens=1, max_tokens=9), TextOptions(("hello",)))
    choice = Generation(fleet, job, Metrics()).choices[0]
    assert choice.push(SliceOutput(tokens), None)
    piece = choice.take()
    assert (piece.text, piece.finish_reason) == ("hello ", "stop")


def test_a_stop_string_may_begin_before_min_tokens_and_end_after() -> None:
    tokens = TOKENIZER.encode("hello hello name", False)
    assert len(tokens) == 3
    fleet = FakeFleet({"tiny": 100}, 300)
    params, stops = SamplingParams(min_tokens=len(tokens) - 1, max_tokens=99), ("hello name", "hello hello")
    job = Job("tiny", TOKENIZER, [Prompt([5])], 1, params, TextOptions(stops))
    choice = Generation(fleet, job, Metrics()).choices[0]
    for token in tokens:
        choice.push(SliceOutput([token]), None)
    piece = choice.take()
    assert (piece.text, piece.finish_reason) == ("hello ", "stop")


async def test_a_fault_in_the_sink_ends_its_request_alone(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_process(tokenizer) as server:
        server.fleet.script = ["no token"]  # type: ignore[list-item]
        answer = await server.client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500 and "could not be taken" in caplog.text
        server.fleet.script = None
        assert (await server.client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_completion_logprobs(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        body = {"prompt": "hello name", "max_tokens": 3, "logprobs": 2, "echo": True, "seed": 3}
        choice = (await server.client.post("/v1/completions", json=body)).json()["choices"][0]
        logs, prompt = choice["logprobs"], tokenizer.encode("hello name", True)
        assert len({len(logs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
        assert len(logs["tokens"]) == len(prompt) + 3
        assert logs["token_logprobs"][0] is None and logs["top_logprobs"][0] is None
        fleet = server.fleet
        generated = [fleet.token(fleet.submitted[0].params, i) for i in range(3)]
        for token, value, top in zip(
            prompt[1:] + generated, logs["token_logprobs"][1:], logs["top_logprobs"][1:], strict=True
        ):
            assert value == pytest.approx(fleet.logprob(token, 0).logprob)
            assert {"<s>", "</s>"} <= top.keys() and value in top.values() and len(top) <= 3
        assert choice["text"].startswith("hello name") and logs["text_offset"][: len(prompt)] == [0, 5]
        assert fleet.submitted[0].params.prompt_logprobs == 2


async def test_two_tokens_of_one_text_are_told_apart(tokenizer: Tokenizer) -> None:
    """Parts of characters have OpenAI's byte notation, so a dictionary by text loses none."""
    parts = [t for t in range(tokenizer.vocab_size) if tokenizer.token_text(t) == "�"][:2]
    async with in_process(tokenizer) as server:
        server.fleet.script = parts
        body = {"prompt": "a", "max_tokens": 2, "logprobs": 0}
        names = (await server.client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]["tokens"]
        assert len(set(names)) == 2 and all(name.startswith("bytes:\\x") for name in names)


async def test_chat_logprobs(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        body = {**CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
        content = (await server.client.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"][
            "content"
        ]
        assert len(content) == 3
        for i, entry in enumerate(content):
            token = server.fleet.token(server.fleet.submitted[0].params, i)
            assert bytes(entry["bytes"]) == tokenizer.token_bytes(token) and entry["token"] == tokenizer.token_text(
                token
            )
            assert [top["token"] for top in entry["top_logprobs"]] == ["<s>", "</s>"]
        body = {**CHAT, "max_tokens": 3, "logprobs": True}
        content = (await server.client.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"][
            "content"
        ]
        assert all(entry["top_logprobs"] == [] for entry in content)


async def test_minus_infinity_is_json(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        lowest = float("-inf")
        server.fleet.logprob = lambda token, top: TokenLogprobs(token, lowest, 9, [0], [lowest])  # type: ignore
        body = {"prompt": "a", "max_tokens": 1, "logprobs": 1}
        logs = (await server.client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        assert logs["token_logprobs"] == [-9999.0] and set(logs["top_logprobs"][0].values()) == {-9999.0}


async def test_scoring_without_generating(tokenizer: Tokenizer) -> None:
    """max_tokens 0 with echo: one token is asked for and thrown away."""
    async with in_process(tokenizer) as server:
        body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        answer = (await server.client.post("/v1/completions", json=body)).json()
        assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [3, 2]
        assert [choice["text"] for choice in answer["choices"]] == [
            "".join(map(tokenizer.token_text, p)) for p in body["prompt"]
        ]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
        assert [seq.params.max_tokens for seq in server.fleet.submitted] == [1, 1]


async def test_lm_eval_reads_the_tokens_of_a_prompt(tokenizer: Tokenizer) -> None:
    """As lm-eval scores: token ids in, `token_logprobs[ctxlen:-1]` out."""
    async with in_process(tokenizer) as server:
        prompts = [[5, 6, 7, 8], [9, 10, 11]]
        body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
        answer = (await server.client.post("/v1/completions", json={**body, "echo": True})).json()
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
            expected = [server.fleet.logprob(token, 1).logprob for token in prompt[2:]]
            assert choice["logprobs"]["token_logprobs"][2:-1] == pytest.approx(expected)


async def test_prompts_and_choices_have_their_indices(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        body = {"prompt": ["a", "b c", "d"], "n": 2, "max_tokens": 4, "seed": 9, "echo": True}
        answer = (await server.client.post("/v1/completions", json=body)).json()
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        assert [choice["text"][:1] for choice in choices][:4] == ["a", "a", "b", "b"]
        assert choices[0]["text"][1:] == choices[2]["text"][3:]  # one seed and choice: the same tokens
        assert choices[0]["text"] != choices[1]["text"]
        sizes = [len(tokenizer.encode("a", True)), len(tokenizer.encode("b c", True)), 1]
        assert answer["usage"]["prompt_tokens"] == sum(sizes) and answer["usage"]["completion_tokens"] == 24


async def test_a_seed_makes_answers_repeat(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:

        async def ask(**more: Any) -> str:
            body = {"prompt": "hello", "max_tokens": 20, **more}
            return (await server.client.post("/v1/completions", json=body)).json()["choices"][0]["text"]

        assert await ask(seed=1) == await ask(seed=1) != await ask(seed=2)
        assert await ask() != await ask()
