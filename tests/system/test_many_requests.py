"""All kinds of requests at once, with drafts, little cache and clients that leave: each answer is what it is alone."""

import asyncio
import json
from random import Random
from typing import Any

import httpx
import pytest

from tests.system.server import Server

FLEET = "models: [{name: coder, source: 'builtin:coder', speculation: {drafter: '%s', max_draft_tokens: 6%s}}]"
WORDS = ["def ", "import ", "return ", "x", " = ", "1", ", ", "\n", "    ", "self", "(", ")", "é", "世界", "😀"]
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 5},
    {"type": "string", "maxLength": 12},
]
FORMATS = [{"type": "json_object"}, *({"type": "json_schema", "json_schema": {"schema": one}} for one in SCHEMAS)]
OPTIONS: dict[str, tuple[float, list[Any]]] = {  # chance, and values
    "seed": (1, [0, 1, -1, 2**62]),
    "temperature": (1, [0, 0, 0.3, 0.8, 1, 2]),
    "max_tokens": (1, [1, 2, 8, 33, 80, 150]),
    "min_tokens": (0.1, [1]),
    "n": (0.2, [2, 3, 8]),
    "top_p": (0.2, [0.1, 0.9, 1e-6]),
    "top_k": (0.2, [-1, 1, 10, 10**5]),
    "min_p": (0.1, [0.05, 1]),
    "presence_penalty": (0.15, [-2, 0.5]),
    "frequency_penalty": (0.15, [-0.5, 2]),
    "repetition_penalty": (0.1, [0.8, 1.2]),
    "logit_bias": (0.15, [{"17": 100, "18": -100}, {str(i): -100 for i in range(200)}]),
    "stop": (0.3, ["\n", ["import", ", 1]"], ["\n\n", "self", "=", "def"], "世"]),
    "stop_token_ids": (0.15, [[10], [17, 0]]),
    "include_stop_str_in_output": (0.2, [True]),
    "ignore_eos": (0.2, [True]),
    "skip_special_tokens": (0.1, [False]),
    "speculation": (0.2, [{"max_draft_tokens": 1}, {"max_draft_tokens": 16}, {"smooth": False}]),
    "response_format": (0.15, FORMATS),
    "structured_outputs": (0.1, [{"choice": ["self", "x = 1", "é世"]}, {"regex": "[a-z]+[0-9]"}, {"json": SCHEMAS[2]}]),
    "stream": (0.5, [True]),
}
CHAT = {"logprobs": (0.4, [True])}
TEXT = {"logprobs": (0.4, [0, 1, 5]), "echo": (0.2, [True])}


def make(random: Random) -> tuple[str, dict[str, Any]]:
    def text() -> str:
        return "".join(random.choices(WORDS, k=random.randint(1, 60)))

    chat = random.random() < 0.4
    options = OPTIONS | (CHAT if chat else TEXT)
    body = {name: random.choice(values) for name, (chance, values) in options.items() if random.random() < chance}
    if "structured_outputs" in body:
        body.pop("response_format", None)
    if chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text()}]}
    ids = [random.randint(3, 200) for _ in range(random.randint(1, 300))]
    return "/v1/completions", body | {"prompt": random.choice([text(), ids, [text(), text()], [ids, ids[:7]]])}


def parts(choice: dict[str, Any]) -> tuple[str, list[Any]]:
    """Text and log-probabilities of a choice, or of a chunk of one."""
    said = choice.get("message") or choice.get("delta") or choice
    logprobs = choice.get("logprobs") or {}
    named = [(each["token"], each["logprob"]) for each in logprobs.get("content") or []]
    pairs = zip(logprobs.get("tokens", []), logprobs.get("token_logprobs", []), strict=True)
    return said.get("content") or said.get("text") or "", named + list(pairs)


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[tuple[str, str, list[Any]]]:
    """By choice: text, finish reason, and tokens with their log-probabilities."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [(text, one["finish_reason"], logs) for one in answer.json()["choices"] for text, logs in [parts(one)]]
    *lines, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    found: dict[int, tuple[str, str, list[Any]]] = {}
    for one in (choice for line in lines for choice in json.loads(line)["choices"]):
        text, end, logs = found.get(one["index"], ("", "", []))
        assert not end, "a chunk after the last"
        more, added = parts(one)
        found[one["index"]] = (text + more, one["finish_reason"] or "", logs + added)
    return [found[index] for index in sorted(found)]


async def leave(client: httpx.AsyncClient, path: str, body: dict[str, Any], after: float) -> None:
    task = asyncio.create_task(client.post(path, json=body | {"max_tokens": 300, "ignore_eos": True}))
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("drafter", "seed", "count"),
    [
        ("builtin:coder-draft", 1, 40),
        pytest.param("builtin:coder-draft", 2, 1000, marks=pytest.mark.slow),
        pytest.param("ngram+early_exit", 3, 1000, marks=pytest.mark.slow),
    ],
)
async def test_each_answer_is_what_it_is_alone(tmp_path, drafter, seed, count):
    random, fleet = Random(seed), tmp_path / "fleet.yaml"
    fleet.write_text(FLEET % (drafter, ", adaptive: false"))
    cases = [make(random) for _ in range(count)]
    with Server(str(fleet), "--num-blocks", "50", "--context", "768", "--token-budget", "48") as server:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:
            leaving = [leave(client, *make(random), after=random.random()) for _ in range(count // 8)]
            answers = [ask(client, *case) for case in cases]
            together = (await asyncio.gather(*answers, *leaving))[:count]
            for (path, body), ours in zip(cases, together, strict=True):
                theirs = await ask(client, path, body | {"speculation": {"enabled": False}})
                assert [one[:2] for one in ours] == [one[:2] for one in theirs], (path, body)
                for (_, _, some), (_, _, others) in zip(ours, theirs, strict=True):
                    assert [token for token, _ in some] == [token for token, _ in others], (path, body)
                    assert [value for _, value in some] == pytest.approx([value for _, value in others], abs=1e-3)
        assert server.metric("paceline_num_preemptions_total") > 0
        assert server.metric("paceline_spec_decode_num_accepted_tokens_total") > 0
        assert server.metric("paceline_running") == server.metric("paceline_waiting") == 0
