"""The real openai-python client against the real server with the built-in model."""

import pytest

from tests.system.server import until

PROMPT = "class Stack:\n    def __init__(self, "


def streamed(client, **request):
    """Concatenated texts and finish reasons by choice, and the usage."""
    texts, finish, usage = {}, {}, None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in finish, "one finish chunk a choice"
                finish[choice.index] = choice.finish_reason
    return texts, finish, usage


@pytest.mark.parametrize(
    "request_",
    [
        {"max_tokens": 40, "temperature": 0},
        {"max_tokens": 40, "temperature": 0.9, "seed": 7},
        {"max_tokens": 40, "temperature": 0.9, "seed": 7, "n": 3},
        {"max_tokens": 60, "temperature": 0, "stop": ["\n", "return"]},
        {"max_tokens": 30, "temperature": 0.8, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.5, "echo": True},
    ],
)
def test_streaming_equals_not_streaming(client, request_):
    request = {"model": "coder", "prompt": PROMPT, **request_}
    whole = client.completions.create(**request)
    texts, finish, usage = streamed(client, **request)
    assert texts == {c.index: c.text for c in whole.choices}
    assert finish == {c.index: c.finish_reason for c in whole.choices}
    assert usage == whole.usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_chat_streams_what_it_answers(client):
    request = {
        "model": "coder",
        "messages": [{"role": "user", "content": "def add(a, b):"}],
        "max_tokens": 30,
        "seed": 3,
        "temperature": 0.7,
    }
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(stream=True, **request))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_choices_of_a_seeded_request_differ_and_repeat(client):
    request = {"model": "coder", "prompt": PROMPT, "max_tokens": 32, "temperature": 1.0, "n": 4, "seed": 11}
    first = [c.text for c in client.completions.create(**request).choices]
    again = [c.text for c in client.completions.create(**request).choices]
    assert first == again and len(set(first)) == 4
    alone = client.completions.create(**{**request, "n": 1}).choices[0].text
    assert alone == first[0], "choice 0 does not depend on how many there are"


def test_unseeded_requests_differ(client):
    request = {"model": "coder", "prompt": PROMPT, "max_tokens": 32, "temperature": 1.0}
    assert len({client.completions.create(**request).choices[0].text for _ in range(3)}) > 1


def test_stop_is_cut_before_and_across_tokens(client):
    request = {"model": "coder", "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    whole = client.completions.create(**request).choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    cut = client.completions.create(**request, stop=stop).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


def test_logprobs_are_of_the_tokens_drawn(client):
    answer = client.completions.create(model="coder", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob <= 0 and top[token] == pytest.approx(logprob, abs=1e-6)
        assert logprob == max(top.values()), "greedy takes the likeliest"
    chat = client.chat.completions.create(
        model="coder", messages=[{"role": "user", "content": "x"}], max_tokens=4, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert b"".join(bytes(e.bytes) for e in content).decode(errors="replace") == chat.choices[0].message.content


def test_a_cancelled_stream_frees_its_blocks(server, client):
    request = {"model": "coder", "prompt": PROMPT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(stream=True, **request)
    next(iter(stream))
    assert server.metric("paceline_running") >= 1
    stream.close()
    until(lambda: server.metric("paceline_running") == 0)


def test_mistakes_are_400_and_unknown_models_404(client):
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="coder", prompt="x", temperature=9)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="coder", prompt="x " * 20_000)
    assert refused.value.code == "context_length_exceeded"


def test_both_built_in_models_are_served(client):
    assert {model.id for model in client.models.list()} == {"coder", "coder-draft"}
    assert client.completions.create(model="coder-draft", prompt=PROMPT, max_tokens=4).choices[0].text
