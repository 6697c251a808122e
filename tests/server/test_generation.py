"""How a request becomes sequences: order, refusal, and cancellation wherever the client leaves."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.api import ModelStatus, Unavailable
from paceline.server.app import ServedModel, ServerConfig
from paceline.server.errors import from_rejection
from tests.server.conftest import Server, in_process, in_thread, make_tokenizer, until, wait_for
from tests.server.fake_fleet import FakeFleet

BODY = {"prompt": "hello", "max_tokens": 200, "n": 3}
PATHS = [("/v1/completions", BODY), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 3})]


class Client:
    """Calls the app with its own `receive` and `send`, so that it can leave when it wants."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._body = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"host", b"x")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0"}}
        scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": ""}
        self.task = asyncio.create_task(server.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if not self.gone.is_set():
            self.sent.append(message)

    @property
    def bodies(self) -> int:
        return sum(message["type"] == "http.response.body" for message in self.sent)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_leaving_in_the_queue_cancels(tokenizer: Tokenizer, path: str, body: dict, stream: bool) -> None:
    async with in_process(tokenizer) as server:
        server.fleet.paused = True
        client = Client(server, path, {**body, "stream": stream})
        await until(lambda: len(server.fleet.running) == 1)
        client.gone.set()
        await asyncio.wait_for(client.task, 5)
        assert server.fleet.cancelled == ["1"] and not server.fleet.running and not server.app.state.api.generations


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_leaving_under_way_cancels_every_choice(
    tokenizer: Tokenizer, path: str, body: dict, stream: bool
) -> None:
    async with in_process(tokenizer, step_s=0.01) as server:
        client = Client(server, path, {**body, "stream": stream})
        await until(lambda: len(server.fleet.running) == 3 and all(s.generated for s in server.fleet.running.values()))
        client.gone.set()
        await until(lambda: not server.fleet.running)
        await asyncio.wait_for(client.task, 5)
        assert sorted(server.fleet.cancelled) == ["1", "2", "3"] and not server.app.state.api.generations
        ended = server.app.state.api.metrics.models["tiny"].ended
        assert ended == {"stop": 0, "length": 0, "abort": 3, "error": 0}


async def test_leaving_before_the_others_are_submitted(tokenizer: Tokenizer) -> None:
    """The first choice has not begun: its siblings are never submitted."""
    async with in_process(tokenizer) as server:
        server.fleet.paused = True
        client = Client(server, "/v1/completions", {**BODY, "stream": True})
        await until(lambda: len(server.fleet.running) == 1)
        client.gone.set()
        await asyncio.wait_for(client.task, 5)
        server.fleet.paused = False
        assert len(server.fleet.submitted) == 1 and not server.fleet.running


def test_a_closed_connection_cancels(tokenizer: Tokenizer) -> None:
    """The same over real HTTP."""
    with in_thread(tokenizer, step_s=0.02) as server:
        with server.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            wait_for(lambda: len(server.fleet.running) == 3)
        wait_for(lambda: not server.fleet.running)
        assert len(server.fleet.cancelled) == 3


async def test_a_complete_answer_cancels_nothing(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        for path, body in PATHS:
            for stream in (True, False):
                await server.client.post(path, json={**body, "max_tokens": 5, "stream": stream})
        assert not server.fleet.cancelled and not server.fleet.running and not server.app.state.api.generations


async def test_the_first_choice_comes_before_its_siblings(tokenizer: Tokenizer) -> None:
    """So that they find the prompt's blocks in the prefix cache."""
    async with in_process(tokenizer) as server:
        server.fleet.paused = True
        client = Client(server, "/v1/completions", {"prompt": ["a", "b"], "n": 3, "max_tokens": 4})
        await until(lambda: len(server.fleet.submitted) == 2)
        await asyncio.sleep(0.05)
        assert [s.params.choice for s in server.fleet.submitted] == [0, 0]
        server.fleet.paused = False
        await asyncio.wait_for(client.task, 5)
        assert sorted(s.params.choice for s in server.fleet.submitted) == [0, 0, 1, 1, 2, 2]
        assert len({s.params.seed for s in server.fleet.submitted}) == 1


@pytest.mark.parametrize(
    ("path", "body"), [*PATHS, ("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/embeddings", {"input": ["a", "b"]})]
)
async def test_a_request_came_before_its_prompt_was_encoded(
    tokenizer: Tokenizer, path: str, body: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all its sequences, by one look at the clock."""
    done, encode = list[str](), Tokenizer.encode
    clock = SimpleNamespace(monotonic=lambda: done.append("clock") or float(len(done)))
    monkeypatch.setattr("paceline.server.body.time", clock)
    monkeypatch.setattr(Tokenizer, "encode", lambda *arguments: done.append("encode") or encode(*arguments))
    models = {"tiny": 4 if "embeddings" in path else None}
    async with in_process(tokenizer, models=models) as server:
        answer = await server.client.post(path, json=body | ({} if "input" in body else {"max_tokens": 2}))
        assert answer.status_code == 200 and done.index("clock") == 0 and done.count("clock") == 1 < len(done)
        first, *others = [s.arrival for s in server.fleet.submitted]
        assert first == 1.0 and others and set(others) <= {1.0, None}
        [first_token] = [one.first_token for one in server.app.state.api.metrics.models.values() if one.prompt_tokens]
        late = asyncio.get_running_loop().time() - 1.0
        assert first_token.sum == pytest.approx(len(server.fleet.submitted) * late, rel=0.1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": ["a", ""], "n": 2}, "prompt.1"),
        ("/v1/completions", {"prompt": ["", "a"], "stream": True}, "prompt.0"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}, "messages"),
    ],
)
async def test_a_prompt_without_tokens_is_refused_with_those_beside_it(path: str, body: dict, param: str) -> None:
    async with in_process(make_tokenizer("{{ messages[0].content }}")) as server:
        answer = await server.client.post(path, json=body | {"max_tokens": 3})
        assert answer.status_code == 400 and not server.fleet.submitted
        error = answer.json()["error"]
        assert (error["param"], error["message"]) == (param, f"{param}: it has no tokens")


async def test_a_schema_needs_a_model_whose_texts_end(tokenizer: Tokenizer) -> None:
    endless = make_tokenizer()
    endless.eos_ids = ()
    for one, status in ((tokenizer, 200), (endless, 400)):
        async with in_process(one) as server:
            body = {"prompt": "a", "max_tokens": 3, "response_format": {"type": "json_object"}}
            answer = await server.client.post("/v1/completions", json=body)
            assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "response_format" and "no end of sequence" in answer.text


async def test_siblings_do_not_compute_the_prompts_logprobs_again(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        body = {"prompt": [5, 6, 7], "n": 3, "max_tokens": 2, "echo": True, "logprobs": 1}
        choices = (await server.client.post("/v1/completions", json=body)).json()["choices"]
        assert [s.params.prompt_logprobs for s in server.fleet.submitted] == [1, None, None]
        logs = [choice["logprobs"]["token_logprobs"][:3] for choice in choices]
        assert logs[0] == logs[1] == logs[2] and logs[0][1] is not None


async def test_siblings_are_taken_by_a_full_queue(tokenizer: Tokenizer) -> None:
    """A request that was accepted does not fail because its other choices find the queue full."""
    async with in_process(tokenizer, capacity=1) as server:
        answer = await server.client.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 3})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 6


async def test_hurry_submits_what_waits(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        server.fleet.paused = True
        body = {"prompt": [5, 6, 7], "n": 3, "max_tokens": 2, "echo": True, "logprobs": 0}
        client = Client(server, "/v1/completions", body)
        await until(lambda: len(server.fleet.running) == 1)
        server.app.state.api.hurry()
        assert len(server.fleet.running) == 3
        draining = asyncio.create_task(server.fleet.drain())
        server.fleet.paused = False
        await asyncio.wait_for(client.task, 5)
        await draining
        choices = json.loads(client.sent[-1]["body"])["choices"]
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [5, 5, 5]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_full_queue_is_503_with_retry_after(tokenizer: Tokenizer, path: str, body: dict, stream: bool) -> None:
    async with in_process(tokenizer, capacity=0) as server:
        answer = await server.client.post(path, json={**body, "stream": stream})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_goal_out_of_reach_is_429_with_the_time(
    tokenizer: Tokenizer, path: str, body: dict, stream: bool
) -> None:
    async with in_process(tokenizer) as server:
        server.fleet.expected = 3.2
        goal = {"x-slo-ttft-ms": "500"}
        answer = await server.client.post(path, json={**body, "stream": stream}, headers=goal)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
        assert (answer.headers["x-should-retry"], answer.headers["x-predicted-ttft-ms"]) == ("false", "3200")
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("slo_unreachable", "rate_limit_error")
        assert "3200 ms" in error["message"] and "500 ms" in error["message"]
        server.fleet.expected_tbt = 0.0125
        answer = await server.client.post(path, json={**body, "stream": stream}, headers={"x-slo-tpot-ms": "10"})
        assert (answer.status_code, answer.headers["x-predicted-tpot-ms"]) == (429, "12.5")
        assert "tokens are expected every 12.5 ms, the goal is 10 ms" in answer.json()["error"]["message"]
        assert not server.fleet.running
        assert (await server.client.post(path, json={**body, "max_tokens": 1})).status_code == 200, "no goal, no limit"


async def test_prompts_are_taken_all_or_none(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_process(tokenizer) as server:
        expected = property(lambda fleet: float(len(fleet.running)))
        monkeypatch.setattr(FakeFleet, "expected", expected.setter(lambda *_: None), raising=False)
        goal = {"x-slo-ttft-ms": "1500"}
        answer = await server.client.post("/v1/completions", json={"prompt": ["a", "b", "c"]}, headers=goal)
        assert answer.status_code == 429 and len(server.fleet.cancelled) == 2 and not server.fleet.running


@pytest.mark.parametrize("n", [1, 2])
async def test_more_prompts_than_the_queue_has_room_for_follow_each_other(tokenizer: Tokenizer, n: int) -> None:
    """As long as it has room for the first one: however many there are, that will be so some day."""
    async with in_process(tokenizer, capacity=2, step_s=0.001) as server:
        most, submit = 0, server.fleet.submit

        def count(*arguments: Any, **options: Any) -> str:
            nonlocal most
            id = submit(*arguments, **options)
            most = max(most, sum(seq.params.choice == 0 for seq in server.fleet.running.values()))
            return id

        server.fleet.submit = count  # type: ignore[method-assign]
        server.fleet.refused = 0
        prompts = [[5, number] for number in range(40, 47)]
        body = {"prompt": prompts, "max_tokens": 3, "n": n, "echo": True}
        answer = await server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3 * 7 * n and most == 2
        assert server.fleet.refused == 0, "who follows was not refused before"
        came = [seq.arrival is not None for seq in server.fleet.submitted]
        assert came == [True] * 2 + [False] * (7 * n - 2), "who follows is not before those who came meanwhile"
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert all(text.startswith(tokenizer.decode(prompts[i // n], True)) for i, text in enumerate(texts))
        server.fleet.paused = True
        client = Client(server, "/v1/completions", body)
        await until(lambda: len(server.fleet.running) == 2)
        assert (await server.client.post("/v1/completions", json=body)).status_code == 503, "not even for the first"
        server.app.state.api.hurry()
        assert len(server.fleet.running) == 7 * n, "a drain waits for all of them"
        client.gone.set()
        await asyncio.wait_for(client.task, 5)
        assert not server.fleet.running and len(server.fleet.cancelled) == 7 * n


async def test_draining_is_503(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        server.fleet.draining = True
        answer = await server.client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "3"
        ready = await server.client.get("/ready")
        assert ready.status_code == 503 and "retry-after" in ready.headers
        assert (await server.client.get("/health")).status_code == 200


async def test_too_long_for_the_cache_is_400(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        server.fleet.models["tiny"] = 20
        statuses = server.fleet.status
        server.fleet.status = lambda: []  # type: ignore[method-assign]
        answer = await server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 100})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        server.fleet.status = statuses  # type: ignore[method-assign]
        answer = await server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 100})
        assert answer.status_code == 400 and "20 tokens" in answer.json()["error"]["message"]


async def test_a_model_that_the_fleet_lost_is_404(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        server.fleet.models.clear()
        answer = await server.client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


async def test_a_model_that_did_not_load_is_503(tokenizer: Tokenizer) -> None:
    """Its context is not known, and that is no fault of the request."""
    async with in_process(tokenizer) as server:
        api = server.app.state.api
        api.models["tiny"] = ServedModel("tiny", tokenizer, 0)
        server.fleet.status = lambda: [ModelStatus("tiny", "failed", "no weights")]  # type: ignore[method-assign]
        server.fleet.draining = True
        assert (await server.client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        card = (await server.client.get("/v1/models/tiny")).json()
        assert (card["state"], card["reason"], card["max_model_len"]) == ("failed", "no weights", None)


def test_only_what_passes_is_to_be_asked_again() -> None:
    """OpenAI's clients wait as long as they are told, twice."""
    lost, passing = from_rejection(Unavailable("no weights", None)), from_rejection(Unavailable("it starts", 1.5))
    assert lost.status == passing.status == 503
    assert lost.headers == {"x-should-retry": "false"} and passing.headers == {"retry-after": "2"}


async def test_health_follows_the_fleet(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer) as server:
        assert (await server.client.get("/health")).status_code == 200
        server.fleet.healthy = False
        assert (await server.client.get("/health")).status_code == 503
        assert (await server.client.get("/ready")).status_code == 503


async def test_keys_separate_prefix_caches(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer, ServerConfig(api_keys=("one", "two"))) as server:
        for key in ("one", "two", "one"):
            headers = {"authorization": f"Bearer {key}"}
            assert (
                await server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            ).status_code == 200
        names = [s.namespace for s in server.fleet.submitted]
        assert names[0] == names[2] != names[1] and "one" not in names[0] and len(names[0]) == 64
