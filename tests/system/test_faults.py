"""What a running server does when things go wrong around it."""

import asyncio
import json
import os
import random
import shutil
import signal
import threading
import time

import openai
import pytest

from paceline.cli.sources import BUILTIN
from tests.system.server import Server, until

REQUEST = {"model": "coder", "prompt": "def parse(", "temperature": 0.9, "seed": 4, "extra_body": {"ignore_eos": True}}


def test_a_worker_killed_in_the_middle_of_a_stream_changes_nothing(server, client):
    whole = client.completions.create(max_tokens=200, **REQUEST).choices[0].text
    stream = client.completions.create(max_tokens=200, stream=True, **REQUEST)
    text = ""
    for index, chunk in enumerate(stream):
        text += chunk.choices[0].text
        if index == 20:
            for pid in server.workers():
                os.kill(pid, signal.SIGKILL)
    assert text == whole
    until(lambda: server.get("/ready")[0] == 200)


def test_a_stopped_worker_turns_ready_false_and_back(server):
    pid = server.workers()[0]
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        until(lambda: server.get("/ready")[0] == 503, 3)
        assert time.monotonic() - begin < 2.2
        assert server.get("/health")[0] == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: server.get("/ready")[0] == 200)


async def leave_early(host: str, port: int, rng: random.Random) -> None:
    """Sends a request and hangs up at a random moment: at once, while queued, in prefill, while it streams."""
    words = " ".join(rng.choice("abcdefghij") for _ in range(rng.choice([4, 60, 400])))
    body = json.dumps({"model": "coder", "prompt": words, "max_tokens": 300, "stream": rng.random() < 0.7}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()
    moment = rng.random()
    if moment > 0.3:
        await asyncio.sleep(rng.random() * 0.15)
    if moment > 0.8:
        await reader.read(200)
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_disconnects_leak_no_block(server, count):
    host, port = server.url.removeprefix("http://").split(":")
    rng = random.Random(0)

    async def storm() -> None:
        gate = asyncio.Semaphore(48)

        async def one() -> None:
            async with gate:
                await leave_early(host, int(port), rng)

        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(storm())
    until(lambda: server.metric("paceline_running") + server.metric("paceline_waiting") == 0, 30)
    assert server.metric("paceline_kv_blocks_used") == 0
    assert server.get("/ready")[0] == 200


@pytest.fixture
def own():
    with Server("builtin:coder", "--max-batch", "2", "--max-waiting", "2") as running:
        yield running


def test_sigterm_drains_and_exits_0(own):
    got = []

    def stream() -> None:
        with openai.OpenAI(base_url=own.url + "/v1", api_key="none", max_retries=0) as client:
            for chunk in client.completions.create(max_tokens=900, stream=True, **REQUEST):
                got.append(chunk.choices[0].finish_reason)

    thread = threading.Thread(target=stream)
    thread.start()
    until(lambda: len(got) > 5)
    own.process.send_signal(signal.SIGTERM)
    until(lambda: own.get("/ready")[0] == 503, 1)
    assert got[-1] is None, "the stream goes on while it drains"
    with openai.OpenAI(base_url=own.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="coder", prompt="x")
        assert refused.value.status_code == 503 and int(refused.value.response.headers["retry-after"]) >= 1
    thread.join(60)
    assert got[-1] == "length"
    assert own.process.wait(20) == 0


def test_a_full_queue_is_503_with_a_time(own):
    with openai.OpenAI(base_url=own.url + "/v1", api_key="none", max_retries=0) as client:
        streams = []
        with pytest.raises(openai.InternalServerError) as refused:
            for _ in range(8):
                streams.append(client.completions.create(max_tokens=900, stream=True, **REQUEST))
        assert refused.value.status_code == 503
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 120
        for stream in streams:
            stream.close()


def test_bad_arguments_are_one_line_and_exit_2():
    server = Server("builtin:nobody")
    assert server.process.wait(60) == 2
    until(lambda: server._up.is_set())
    lines = [line for line in server.log if line]
    assert len(lines) == 1 and all(word in lines[0] for word in ("builtin:nobody", "coder"))


def test_an_unsupported_architecture_is_refused_with_the_list(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / "coder" / name, tmp_path)
    server = Server(str(tmp_path))
    assert server.process.wait(60) == 2
    until(lambda: server._up.is_set())
    text = " ".join(server.log)
    assert "GPT2LMHeadModel" in text and "LlamaForCausalLM" in text and "Qwen3ForCausalLM" in text
