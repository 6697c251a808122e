"""The real client against a server that drafts: the same answers as without, in fewer steps."""

import json
import re

import httpx
import openai
import pytest

from tests.system.server import Server

FLEET = (
    "models:\n  - {{name: coder, source: 'builtin:coder', "
    "speculation: {{drafter: '{}', max_draft_tokens: 6, adaptive: false}}}}\n"
)
PROMPT = "import os\nimport sys\n\nx = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1,"
OFF = {"speculation": {"enabled": False}}


@pytest.fixture(scope="module", params=["builtin:coder-draft", pytest.param("ngram", marks=pytest.mark.slow)])
def client(request, tmp_path_factory):
    fleet = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    fleet.write_text(FLEET.format(request.param))
    with (
        Server(str(fleet)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "request_",
    [
        {"temperature": 0},
        {"temperature": 0, "stop": ["import", ", 1]"]},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "seed": 7, "n": 3},
        {"temperature": 0.8, "seed": 8, "top_p": 0.9, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"temperature": 0.6, "seed": 9, "logit_bias": {"17": 3}, "extra_body": {"min_tokens": 40, "top_k": 40}},
    ],
)
def test_drafts_change_no_answer(client, request_):
    request = {"model": "coder", "prompt": PROMPT, "max_tokens": 64, **request_}
    without = client.completions.create(**request | {"extra_body": request.get("extra_body", {}) | OFF})
    drafted = client.completions.create(**request)
    for ours, alone in zip(drafted.choices, without.choices, strict=True):
        assert (ours.text, ours.finish_reason) == (alone.text, alone.finish_reason)
        if "logprobs" in request:
            assert ours.logprobs.tokens == alone.logprobs.tokens
            assert ours.logprobs.token_logprobs == pytest.approx(alone.logprobs.token_logprobs, abs=1e-5)
    assert drafted.usage.completion_tokens == without.usage.completion_tokens
    assert without.usage.completion_tokens_details is None


def test_structured_output_is_drafted(client):
    schema = {"type": "object", "properties": {"kind": {"enum": ["list", "dict"]}}, "required": ["kind"]}
    schema["additionalProperties"] = False
    request = {
        "model": "coder", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, "seed": 3,
        "logprobs": True, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }  # fmt: skip
    drafted, alone = (
        client.chat.completions.create(**request),
        client.chat.completions.create(**request, extra_body=OFF),
    )
    (ours,), (theirs,) = drafted.choices, alone.choices
    assert (ours.message.content, ours.finish_reason) == (theirs.message.content, theirs.finish_reason)
    assert json.loads(ours.message.content)["kind"] in ("list", "dict")
    assert [one.logprob for one in ours.logprobs.content] == pytest.approx(
        [one.logprob for one in theirs.logprobs.content], abs=1e-5
    )
    assert drafted.usage.completion_tokens == alone.usage.completion_tokens


@pytest.mark.parametrize(
    ("structured", "follows"),
    [
        ({"choice": ["a list", "a dictionary"]}, "a list|a dictionary"),
        ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"json": {"enum": [17, "x"]}}, '17|"x"'),
    ],
)
def test_vllms_structured_outputs(client, structured, follows):
    request = {"model": "coder", "prompt": PROMPT, "max_tokens": 60, "seed": 5, "n": 4}
    drafted = client.completions.create(**request, extra_body={"structured_outputs": structured}).choices
    alone = client.completions.create(**request, extra_body={"structured_outputs": structured} | OFF).choices
    assert all(re.fullmatch(follows, one.text) and one.finish_reason == "stop" for one in drafted)
    assert [one.text for one in drafted] == [one.text for one in alone]


@pytest.mark.parametrize("smooth", [True, False])
def test_a_stream_says_what_the_whole_answer_says(client, smooth):
    request = {"model": "coder", "prompt": PROMPT, "max_tokens": 64, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**request).choices[0]
    chunks = list(client.completions.create(**request, stream=True, extra_body={"speculation": {"smooth": smooth}}))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for some in logprobs if some for token in some.tokens] == whole.logprobs.tokens
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_usage_says_what_became_of_drafts(client):
    usage = client.completions.create(model="coder", prompt=PROMPT, max_tokens=64, temperature=0).usage
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 10 and details.rejected_prediction_tokens >= 0
    assert details.accepted_prediction_tokens < usage.completion_tokens


def test_metrics_count_drafts(client):
    client.completions.create(model="coder", prompt=PROMPT, max_tokens=32, temperature=0.8)
    text = httpx.get(str(client.base_url).replace("/v1/", "/metrics")).text
    drafts, tokens, accepted = (
        int(float(re.search(rf'^paceline_spec_decode_{name}_total{{drafter="\w+",group="0"}} (\S+)', text, re.M)[1]))
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    assert 0 < drafts < tokens <= 6 * drafts and accepted <= tokens
    assert 'paceline_step_seconds_total{group="0",part="draft"}' in text


@pytest.mark.parametrize("value", [{"max_draft_tokens": 17}, {"enabled": 1}, {"drafts": 2}])
def test_a_mistake_is_named(client, value):
    with pytest.raises(openai.BadRequestError, match="speculation"):
        client.completions.create(model="coder", prompt="a", extra_body={"speculation": value})
