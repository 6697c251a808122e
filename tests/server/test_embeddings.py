"""/v1/embeddings: what it takes, what it answers and what it refuses, over a fake fleet."""

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from paceline.core.request import SLO
from paceline.engine.tokenizer import Tokenizer
from tests.server.conftest import CONTEXT, Server, in_process, until
from tests.server.fake_fleet import embedding
from tests.server.test_generation import Client
from tests.server.test_metrics import samples
from tests.server.test_protocol import check_envelope

CLS, SEP, CAT, DOG = 1, 2, 3, 4
PATH = "/v1/embeddings"


def wordpiece() -> Tokenizer:
    vocabulary = {"[UNK]": 0, "[CLS]": CLS, "[SEP]": SEP, "cat": CAT, "dog": DOG}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    backend.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return Tokenizer(backend)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with in_process(wordpiece(), models={"mini": 4, "tiny": None}) as server:
        yield server


async def post(server: Server, **body: Any) -> dict[str, Any]:
    answer = await server.client.post(PATH, json={"model": "mini", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("cat", [[CLS, CAT, SEP]]),
        ("CAT dog", [[CLS, CAT, DOG, SEP]]),
        (["cat", "dog cat"], [[CLS, CAT, SEP], [CLS, DOG, CAT, SEP]]),
        ([CAT, DOG], [[CAT, DOG]]),
        ([[CAT], [DOG, CAT]], [[CAT], [DOG, CAT]]),
        ([CAT] * CONTEXT, [[CAT] * CONTEXT]),
    ],
)
async def test_every_form_of_input(server: Server, given: Any, tokens: list[list[int]]) -> None:
    answer = await post(server, input=given, user="me", dimensions=4)
    data = [
        {"object": "embedding", "index": i, "embedding": list(struct.unpack("<4f", embedding(ids)))}
        for i, ids in enumerate(tokens)
    ]
    count = sum(map(len, tokens))
    usage = {"prompt_tokens": count, "total_tokens": count}
    assert answer == {"object": "list", "data": data, "model": "mini", "usage": usage}
    assert [seq.tokens for seq in server.fleet.submitted] == tokens
    assert all(seq.params.max_tokens == 1 for seq in server.fleet.submitted)
    coded = await post(server, input=given, encoding_format="base64")
    assert [base64.b64decode(one["embedding"]) for one in coded["data"]] == [embedding(ids) for ids in tokens]
    assert not server.app.state.api.generations


@pytest.mark.parametrize(
    ("limit", "tokens"), [(3, [CLS, CAT, SEP]), (4, [CLS, CAT, DOG, SEP]), (1, [SEP]), (9, [CLS, CAT, DOG, SEP])]
)
async def test_truncation_keeps_the_end_of_a_text(server: Server, limit: int, tokens: list[int]) -> None:
    await post(server, input="cat dog", truncate_prompt_tokens=limit)
    await post(server, input=[CAT, DOG, CAT, SEP, DOG], truncate_prompt_tokens=limit)
    assert [seq.tokens for seq in server.fleet.submitted] == [tokens, [CAT, DOG, CAT, SEP, DOG][:limit]]
    await post(server, input="cat " * 1000, truncate_prompt_tokens=-1)
    assert server.fleet.submitted[-1].tokens == [CLS, *[CAT] * (CONTEXT - 2), SEP]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "empty string"),
        ({"input": ["cat", ""]}, "input", "empty string"),
        ({"input": []}, "input", "must be a string, a list"),
        ({"input": [[]]}, "input", "non-empty lists"),
        ({"input": [["cat"]]}, "input", "non-empty lists"),
        ({"input": ["cat", 3]}, "input", "must be all strings"),
        ({"input": {"text": "cat"}}, "input", "must be a string, a list"),
        ({"input": [True]}, "input", "must be all strings"),
        ({"input": [-1]}, "input", "integers from 0"),
        ({"input": ["cat"] * 2049}, "input", "2049 entries; at most 2048"),
        ({"input": [5]}, "input", "5 is outside the vocabulary of 5"),
        ({"input": [[1], [7]]}, "input.1", "7 is outside the vocabulary of 5"),
        ({"input": [CAT] * (CONTEXT + 1)}, "input", f"it has {CONTEXT + 1} tokens; the model's context is {CONTEXT}"),
        ({"input": ["cat", "cat " * CONTEXT]}, "input.1", f"has {CONTEXT + 2} tokens; the model's context is"),
        ({"input": "cat " * 300, "truncate_prompt_tokens": 300}, "input", "has 300 tokens; the model's context is 256"),
        ({"input": "cat", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"input": "cat", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        ({"input": "cat", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "cat", "dimensions": 3}, "dimensions", "'mini' have 4 numbers"),
        ({"input": "cat", "dimensions": 5}, "dimensions", "'mini' have 4 numbers"),
        ({"input": "cat", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "cat", "dimensions": "4"}, "dimensions", "integer"),
        ({"input": "cat", "model": "tiny"}, "model", "'tiny' gives no embeddings; use /v1/completions"),
        ({"input": "cat", "prompt": "x"}, "prompt", "unknown field"),
        ({"input": "cat", "encoding": "float"}, "encoding", "did you mean 'encoding_format'"),
    ],
)
async def test_mistakes_are_400_and_name_the_field(server: Server, body: dict, param: str, words: str) -> None:
    answer = await server.client.post(PATH, json={"model": "mini", **body})
    error = check_envelope(answer.json())
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error
    assert error["code"] == ("context_length_exceeded" if "context is" in words else error["code"])
    assert not server.fleet.submitted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "cat"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "cat"}]}),
    ],
)
async def test_an_encoder_generates_nothing(server: Server, path: str, body: dict[str, Any]) -> None:
    answer = await server.client.post(path, json={"model": "mini", **body})
    error = check_envelope(answer.json())
    assert answer.status_code == 400 and error["param"] == "model" and "use /v1/embeddings" in error["message"]
    assert not server.fleet.submitted


async def test_an_unknown_model_is_404(server: Server) -> None:
    answer = await server.client.post(PATH, json={"model": "nobody", "input": "cat"})
    assert answer.status_code == 404 and check_envelope(answer.json())["code"] == "model_not_found"


async def test_a_client_that_leaves_frees_all_its_inputs(server: Server) -> None:
    server.fleet.paused = True
    client = Client(server, PATH, {"model": "mini", "input": ["cat", "dog", "cat dog"]})
    await until(lambda: len(server.fleet.running) == 3)  # all at once
    client.gone.set()
    await asyncio.wait_for(client.task, 5)
    assert server.fleet.cancelled == ["1", "2", "3"] and not server.app.state.api.generations
    found = samples((await server.client.get("/metrics")).text)
    assert found["paceline_request_success_total{finished_reason=abort}{model=mini}"] == 3


async def test_a_fault_of_one_input_is_the_requests(server: Server) -> None:
    server.fleet.fail_after = 0
    answer = await server.client.post(PATH, json={"model": "mini", "input": ["cat", "dog"]})
    assert answer.status_code == 500 and check_envelope(answer.json())["message"] == "the worker is gone"
    assert answer.headers["x-should-retry"] == "false"


async def test_a_full_queue_refuses_the_request_but_not_the_rest_of_one_that_it_took(server: Server) -> None:
    server.fleet.capacity, server.fleet.paused = 1, True
    taken = asyncio.create_task(post(server, input=["cat", "dog", "cat"]))
    await until(lambda: len(server.fleet.running) == 3)
    answer = await server.client.post(PATH, json={"model": "mini", "input": "cat"})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
    server.fleet.paused = False
    assert len((await taken)["data"]) == 3


async def test_others_have_their_turn_while_many_are_submitted(server: Server) -> None:
    server.fleet.paused = True
    client = Client(server, PATH, {"model": "mini", "input": ["cat"] * 2048})
    seen = set()
    while len(server.fleet.running) < 500:
        await asyncio.sleep(0)
        seen.add(len(server.fleet.running))
    assert len(seen) >= 8
    client.gone.set()  # in the middle of it
    await asyncio.wait_for(client.task, 5)
    assert 500 <= len(server.fleet.submitted) < 2048 and not server.fleet.running


async def test_goals_and_drains_are_as_for_other_routes(server: Server) -> None:
    goal = {"x-slo-ttft-ms": "250"}
    assert (await server.client.post(PATH, json={"model": "mini", "input": "cat"}, headers=goal)).status_code == 200
    assert server.fleet.submitted[0].slo == SLO(ttft=0.25)
    server.fleet.paused = True
    running = asyncio.create_task(server.client.post(PATH, json={"model": "mini", "input": "cat"}))
    await until(lambda: bool(server.fleet.running))
    server.app.state.api.abort("the server is shutting down at once")
    assert (await running).status_code == 503
    server.fleet.draining = True
    assert (await server.client.post(PATH, json={"model": "mini", "input": "cat"})).status_code == 503


async def test_metrics_count_inputs_and_no_generated_tokens(server: Server) -> None:
    await post(server, input=["cat", "cat dog"])
    found = samples((await server.client.get("/metrics")).text)
    assert found["paceline_prompt_tokens_total{model=mini}"] == 7
    assert found["paceline_generation_tokens_total{model=mini}"] == 0
    assert found["paceline_request_success_total{finished_reason=stop}{model=mini}"] == 2
    assert found["paceline_e2e_request_latency_seconds_count{model=mini}"] == 2
    assert found["paceline_http_requests_total{code=200}{route=/v1/embeddings}"] == 1


async def test_the_document_describes_the_route(server: Server) -> None:
    document = (await server.client.get("/openapi.json")).json()
    assert set(document["paths"][PATH]["post"]["responses"]) >= {"200", "400", "404", "503"}
    fields = document["components"]["schemas"]["EmbeddingRequest"]
    assert set(fields["properties"]) >= {"input", "encoding_format", "dimensions"} and fields["required"] == ["input"]
