"""Malformed input of every field: a 400 that names it, and never a 5xx."""

import contextlib
import json
from typing import Any

import pytest

from paceline.engine.tokenizer import Tokenizer
from paceline.server import protocol
from paceline.server.body import parse_object
from paceline.server.errors import ApiError
from paceline.server.fields import validate
from paceline.server.protocol import NOT_SUPPORTED, ChatRequest, CompletionRequest
from tests.server.conftest import CONTEXT, Server, build, in_process

HUGE = 10**40
NUMBER = ["1", True, [], {}, HUGE, -HUGE]
COUNT = [*NUMBER, 1.5, 1.0, -1]
FLAG = ["true", 1, 0, [], {}]
TEXT = [1, True, [], {}, "x" * 513]
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}
BAD_SCHEMAS = [
    {"type": "nothing"}, {"$ref": "http://localhost/schema"}, {"$ref": "#/nowhere"}, {"unevaluatedProperties": False},
    {"type": "string", "pattern": "("}, {"enum": ["x" * 40_000]}, {"not": {"type": "string"}}, DEEP,
]  # fmt: skip
COMMON: dict[str, list[Any]] = {
    "model": [1, True, [], {}],
    "n": [*COUNT, 0, 17],
    "stream": FLAG,
    "stream_options": [1, "x", [], {"include_usage": 1}, {"unknown": True}],
    "min_tokens": [*COUNT, 2**31],
    "temperature": [*NUMBER, -0.1, 2.1],
    "top_p": [*NUMBER, 0, -0.1, 1.1],
    "top_k": [*NUMBER, 1.5, -2],
    "min_p": [*NUMBER, -0.1, 1.1],
    "presence_penalty": [*NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NUMBER, -2.1, 2.1],
    "repetition_penalty": [*NUMBER, 0, -1, 10.1],
    "logit_bias": [1, "x", [], {"a": 1}, {"-1": 1}, {"1": "x"}, {"1": 101}, {"1": True}, {"1.0": 1}, {"٣": 1}]
    + [{"99999999": 1}, {"1": 1, "01": 1}, {str(i): 1 for i in range(1025)}, {"1" * 5000: 1}],
    "seed": ["1", True, 1.5, [], {}, 2**64, -(2**63) - 1, HUGE],
    "stop": [1, True, {}, [1], [""], "", [None], "x" * 257, ["é" * 129], ["x"] * 17, [["x"]]],
    "stop_token_ids": [1, "1", {}, [True], ["1"], [-1], [1.5], [HUGE], [99999999], [1] * 1025],
    "include_stop_str_in_output": FLAG,
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "speculation": [1, "x", [], {"enabled": 1}, {"max_draft_tokens": 17}, {"max_draft_tokens": -1}, {"unknown": 1}],
    "response_format": [1, "x", [], {}, {"type": "x"}, {"type": "json_schema"}, {"type": "text", "json_schema": {}}]
    + [{"type": "json_object", "json_schema": {"schema": {}}}, {"type": "json_object", "more": 1}]
    + [{"type": "json_schema", "json_schema": schema} for schema in (1, {"name": "a b"}, {"schema": 1}, {"strict": 1})]
    + [{"type": "json_schema", "json_schema": {"schema": schema}} for schema in BAD_SCHEMAS],
    "structured_outputs": [1, "x", [], {}, {"unknown": 1}, {"regex": 1}, {"regex": "("}, {"choice": []}]
    + [{"choice": [1]}, {"choice": ["#" * 20000]}, {"json": "{"}, {"json": True}, {"schema_": {}}]
    + [{"regex": "a" * 40000}, {"regex": "a[^\\s\\S]"}, {"regex": "(" * 5000}, {"grammar": 'root ::= "a"'}]
    + [{"json_object": 1}, {"json_object": False}, {"regex": "a", "choice": ["b"]}]
    + [{"json": schema} for schema in BAD_SCHEMAS],
    "add_special_tokens": FLAG,
    "user": TEXT,
    "metadata": [1, "x", [], {"a": 1}, {"a": "x" * 513}, {"x" * 65: "a"}, {str(i): "a" for i in range(17)}],
    "store": FLAG,
    "service_tier": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": TEXT,
}
COMPLETION: dict[str, list[Any]] = COMMON | {
    "prompt": [
        None,
        1,
        True,
        {},
        [],
        [[]],
        [True],
        [[True]],
        [1, "a"],
        [[1], "a"],
        [[1], [2.5]],
        [-1],
        [HUGE],
        [[HUGE]],
    ]
    + [[99999999], [[1], [99999999]], ["a"] * 257, [1.5], [None], [{"a": 1}], "", [1] * CONTEXT, [""]],
    "max_tokens": [*COUNT, 2**31, CONTEXT],
    "logprobs": [*COUNT, 21],
    "echo": FLAG,
}
CHAT: dict[str, list[Any]] = COMMON | {
    "messages": [None, 1, "x", {}, [], [1], ["x"], [[]], [{}], [{"role": "user"}], [{"content": "x"}]]
    + [[{"role": role, "content": "x"}] for role in (1, None, "", "a b", "x" * 65, "é", "user\n")]
    + [[{"role": "user", "content": content}] for content in (1, True, {}, [], [1], ["x"], [{"type": "image_url"}])]
    + [[{"role": "user", "content": [part]}] for part in ({"type": "text"}, {"type": "text", "text": 1}, {"text": "x"})]
    + [[{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]]
    + [[{"role": "user", "content": "x", **more}] for more in ({"name": 1}, {"tool_calls": [{}]}, {"unknown": 1})]
    + [[{"role": "user", "content": "x"}] * 4097, [{"role": "user", "content": "x " * CONTEXT}]],
    "max_tokens": [*COUNT, 0, 2**31, CONTEXT],
    "max_completion_tokens": [*COUNT, 0, 2**31, CONTEXT],
    "logprobs": FLAG,
    "top_logprobs": [*COUNT, 21],
    "add_generation_prompt": FLAG,
    "parallel_tool_calls": FLAG,
    "reasoning_effort": TEXT,
    "verbosity": TEXT,
}
ROUTES: list[tuple[str, dict[str, Any], dict[str, list[Any]]]] = [
    ("/v1/completions", {"prompt": "hello"}, COMPLETION),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}, CHAT),
    (
        "/tokenize",
        {"prompt": "hello"},
        {
            "prompt": [None, 1, [], {}],
            "add_special_tokens": FLAG,
            "return_token_strs": FLAG,
            "add_generation_prompt": FLAG,
        }
        | {"messages": [[], [{"role": "user", "content": "x"}], 1], "model": [1, [], {}]},
    ),
    (
        "/detokenize",
        {"tokens": [1]},
        {"tokens": [None, 1, "x", {}, [True], ["1"], [-1], [1.5], [HUGE], [99999999], [None]], "model": [1, []]}
        | {"skip_special_tokens": FLAG},
    ),
]
CONTEXT_FAULTS = ("context", "tokens")  # said of the whole request, not of a field


def check_envelope(body: dict[str, Any]) -> dict[str, Any]:
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and len(body["error"]["message"]) < 1500
    return body["error"]


@pytest.mark.parametrize(("path", "good", "table"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
async def test_every_field_refuses_what_it_cannot_mean(
    tokenizer: Tokenizer, path: str, good: dict[str, Any], table: dict[str, list[Any]]
) -> None:
    async with in_process(tokenizer) as server:
        assert (await server.client.post(path, json=good)).status_code == 200
        for field, values in table.items():
            for value in values:
                answer = await server.client.post(path, json={**good, field: value})
                shown = f"{field}={str(value)[:80]}: {answer.status_code} {answer.text[:300]}"
                assert answer.status_code == 400, shown
                error = check_envelope(answer.json())
                about = f"{error['param']} {error['message']}"
                assert field in about or any(word in about for word in CONTEXT_FAULTS), shown
        assert not server.fleet.running and not server.fleet.cancelled


def test_the_table_has_every_field() -> None:
    """A new field needs its rows here."""
    assert set(CompletionRequest.model_fields) == set(COMPLETION)
    assert set(ChatRequest.model_fields) == set(CHAT)
    assert set(protocol.TokenizeRequest.model_fields) == set(ROUTES[2][2])
    assert set(protocol.DetokenizeRequest.model_fields) == set(ROUTES[3][2])


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
@pytest.mark.parametrize("value", [1, "x", {"type": "json_object"}, [{"type": "function"}], True])
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    if (name, value) == ("best_of", 1):
        return  # what n = 1 means anyway
    for model, good in ((CompletionRequest, {"prompt": "x"}), (ChatRequest, dict(ROUTES[1][1]))):
        with pytest.raises(ApiError) as caught:
            validate(model, {**good, name: value})
        assert caught.value.status == 400 and caught.value.param == name


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "functions": []},
        {"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}},
        {"structured_outputs": {"json": '{"type": "integer"}', "json_object": False, "regex": None}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"regex": "[a-c]+"}},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"best_of": 2, "n": 2, "suffix": "", "modalities": ["text"], "stop": None, "seed": None, "logit_bias": None},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"},
        {"seed": -(2**63), "top_k": -1, "stop": [], "logit_bias": {}, "stop_token_ids": []},
        {"seed": 2**64 - 1, "temperature": 0, "top_p": 1, "n": 16, "stream": True, "stream_options": {}},
    ],
)
async def test_what_is_harmless_is_taken(tokenizer: Tokenizer, extra: dict[str, Any]) -> None:
    async with in_process(tokenizer) as server:
        for path, good, _ in ROUTES[:2]:
            answer = await server.client.post(path, json={**good, "max_tokens": 2, **extra})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 16, "prompt": ["a"] * 17}, "n"),
        ({"temprature": 1}, "temprature"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_fields_that_do_not_go_together(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(CompletionRequest, {"prompt": "x", **extra})
    assert caught.value.param == param


def test_an_unknown_field_gets_a_hint() -> None:
    with pytest.raises(ApiError, match="did you mean 'temperature'"):
        validate(CompletionRequest, {"prompt": "x", "temprature": 1})


def test_chat_limits_and_top_logprobs() -> None:
    messages = [{"role": "user", "content": "x"}]
    for extra, param in (
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ):
        with pytest.raises(ApiError) as caught:
            validate(ChatRequest, {"messages": messages, **extra})
        assert caught.value.param == param
    assert validate(ChatRequest, {"messages": messages, "max_completion_tokens": 4}).limit == 4
    assert not validate(ChatRequest, {"messages": messages, "logprobs": False, "top_logprobs": 0}).logprobs


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b"1", "object"),
        (b"null", "object"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": Infinity}', "Infinity"),
        (b'{"prompt": "x", "temperature": -Infinity}', "Infinity"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"prompt": "x", "seed": 1e400}', "seed"),
        (b"[" * 200_000, "nested"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested"),
        (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "prompt"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "JSON"),
        ('{"prompt": "x"}'.encode("utf-16"), "UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "\\uD800": 1}', "surrogate"),
        (b'{"prompt": "x", "stop": ["\\udfff"]}', "surrogate"),
        (b'{"prompt": "x", "n": 1, "n": 2}', "twice"),
        (b'{"prompt": "x", "prompt": "y"}', "twice"),
        (b'{"prompt": "a\nb"}', "JSON"),
        (b'{"prompt": "x"} {}', "JSON"),
        (b'{"prompt": "x",}', "JSON"),
        (b"{'prompt': 'x'}", "JSON"),
        (json.dumps(dict.fromkeys(map(str, range(4097)), 0)).encode(), "4097 keys"),
    ],
)
async def test_what_is_not_strict_json(tokenizer: Tokenizer, body: bytes, word: str) -> None:
    async with in_process(tokenizer) as server:
        headers = {"content-type": "application/json"}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = await server.client.post(path, content=body, headers=headers)
            assert answer.status_code == 400, answer.text
            error = check_envelope(answer.json())
            if path == "/v1/completions":
                assert word in error["message"]


def test_no_depth_is_too_much_for_what_looks_for_surrogates() -> None:
    for depth in range(300, 1100):
        body = b'{"prompt": "\\ud83d\\ude00", "x": ' + b"[" * depth + b"]" * depth + b"}"
        with contextlib.suppress(ApiError):
            parse_object(body)


async def test_pairs_of_surrogates_are_characters(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        body = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1, "echo": true}'
        answer = await server.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.json()["choices"][0]["text"].startswith("😀")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data", None])
async def test_other_content_types_are_415(tokenizer: Tokenizer, kind: str | None) -> None:
    async with in_process(tokenizer) as server:
        headers = {} if kind is None else {"content-type": kind}
        answer = await server.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 415
        check_envelope(answer.json())


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_other_encodings_are_415(tokenizer: Tokenizer, headers: dict[str, str]) -> None:
    async with in_process(tokenizer) as server:
        answer = await server.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 415


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["", "x", "nan", "inf", "-1", "0", "3600001", "1e99", "1" * 400])
async def test_latency_goals_are_bounded(tokenizer: Tokenizer, name: str, value: str) -> None:
    async with in_process(tokenizer) as server:
        answer = await server.client.post("/v1/completions", json={"prompt": "x"}, headers={name: value})
        assert answer.status_code == 400
        assert check_envelope(answer.json())["param"] == name


async def test_latency_goals_reach_the_fleet(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        headers = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5"}
        assert (await server.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
        slo = server.fleet.submitted[0].slo
        assert (slo.ttft, slo.tbt, slo.deadline) == (0.25, 0.0125, None)


async def test_the_context_is_the_limit(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:

        async def ask(tokens: int, **more: Any) -> tuple[int, dict[str, Any]]:
            answer = await server.client.post("/v1/completions", json={"prompt": [5] * tokens, **more})
            return answer.status_code, answer.json()

        for tokens, more in ((CONTEXT, {}), (CONTEXT - 3, {"max_tokens": 4}), (CONTEXT, {"max_tokens": 0})):
            status, body = await ask(tokens, **more)
            assert status == 400 and body["error"]["code"] == "context_length_exceeded", body
        status, body = await ask(CONTEXT - 3, max_tokens=3)
        assert status == 200 and body["usage"]["completion_tokens"] == 3
        status, body = await ask(CONTEXT - 3)  # the default of 16 is no wish
        assert status == 200 and body["usage"]["completion_tokens"] == 3
        status, body = await ask(5)
        assert status == 200 and body["usage"]["completion_tokens"] == 16


async def test_chat_fills_the_context_by_default(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        usage = (await server.client.post("/v1/chat/completions", json=body)).json()["usage"]
        assert usage["total_tokens"] == CONTEXT and usage["prompt_tokens"] + usage["completion_tokens"] == CONTEXT


async def test_an_unknown_model_is_404(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        for path, good, _ in ROUTES:
            answer = await server.client.post(path, json={**good, "model": "gpt-9"})
            error = check_envelope(answer.json())
            assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert "tiny" in error["message"]


def test_a_seed_is_drawn_where_none_is_given() -> None:
    request = validate(CompletionRequest, {"prompt": "x"})
    assert protocol.sampling_params(request, 1).seed != protocol.sampling_params(request, 1).seed
    for seed in (0, 7, -1, 2**64 - 1, -(2**63)):
        given = validate(CompletionRequest, {"prompt": "x", "seed": seed})
        assert 0 <= protocol.sampling_params(given, 1).seed < 2**63


def test_message_parts_are_joined_and_old_answers_taken_back(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    old = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": []}
    request = validate(ChatRequest, {"messages": [{"role": "user", "content": parts, "name": "me"}, old]})
    assert [message.for_template() for message in request.messages] == [
        {"role": "user", "content": "a\nb", "name": "me"},
        {"role": "assistant", "content": ""},
    ]


def test_the_schema_of_a_request_is_closed(tokenizer: Tokenizer) -> None:
    server: Server = build(tokenizer)
    document = json.loads(json.dumps(server.app.openapi()))
    for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest", "Message"):
        assert document["components"]["schemas"][name]["additionalProperties"] is False
