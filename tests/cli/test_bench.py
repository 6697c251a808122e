"""`paceline bench` and servers that do not keep to the form: a request's failure is its own, and told."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from paceline.cli.bench import Client
from paceline.workload.trace import Trace
from tests.cli.command import paceline

ANSWERS = {
    "whole": [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b", "finish_reason": "length"}]}, "[DONE]"],
    "cut": [{"choices": [{"text": "a"}]}],
    "empty": [],
    "odd": ["{oops"],
    "error": [{"error": "[/v1] boom"}],
    "late": [{"choices": [{"text": "a"}]}, "wait"],
}
EMBEDDINGS = {
    "vector": {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3}},
    "longer": {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 5}},  # special tokens were added
    "hollow": {"data": [{"embedding": []}], "usage": {"prompt_tokens": 3}},
    "nothing": {"data": []},
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": name} for name in [*ANSWERS, *EMBEDDINGS, "refused"]]}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(429 if request["model"] == "refused" else 200)
        self.end_headers()
        if self.path == "/v1/embeddings" and request["model"] in EMBEDDINGS:
            self.wfile.write(json.dumps(EMBEDDINGS[request["model"]]).encode())
        for event in ANSWERS.get(request["model"], []):
            if event == "wait":
                self.server.release.wait(10)
                continue
            self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
            self.wfile.flush()

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.release, server.status = threading.Event(), 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def url(server):
    return f"http://127.0.0.1:{server.server_port}"


async def test_only_whole_answers_count(url):
    names = (*ANSWERS, "refused")
    count = len(names)
    ones = np.ones(count, np.int64)
    trace = Trace(np.zeros(count), np.arange(count, dtype=np.int32), 3 * ones, 2 * ones, names)
    client = Client(url, {}, 4.0, False)
    outcomes, _ = await client.send(trace)
    status = dict(zip(names, outcomes.statuses.tolist(), strict=True))
    assert status == {"whole": 0, "cut": 3, "empty": 3, "odd": 3, "error": 3, "late": 3, "refused": 1}
    assert outcomes.outputs[0] == 2 and outcomes.outputs[1] == 1 and sum(client.reasons.values()) == 6
    assert any("ended early" in reason for reason in client.reasons) and "no end within 4 s" in client.reasons


async def test_a_one_shot_request_ends_with_its_first_and_only_answer(url):
    names = (*EMBEDDINGS, "refused")
    count = len(names)
    zeros = np.zeros(count, np.int64)
    client = Client(url, {}, 4.0, False)
    trace = Trace(np.zeros(count), np.arange(count, dtype=np.int32), zeros + 3, zeros, names)
    outcomes, _ = await client.send(trace)
    status = dict(zip(names, outcomes.statuses.tolist(), strict=True))
    assert status == {"vector": 0, "longer": 3, "hollow": 3, "nothing": 3, "refused": 1}
    assert outcomes.first_tokens[0] == outcomes.finishes[0] > 0 and not outcomes.outputs.any()
    assert "ValueError: the server counts 5 tokens in 3 token ids" in client.reasons


async def test_a_server_that_is_none_is_named():
    trace = Trace(np.zeros(1), np.zeros(1, np.int32), np.ones(1, np.int64), np.ones(1, np.int64), ("whole",))
    for bad in ("http://127.0.0.1:abc", "http://127.0.0.1:9"):
        with pytest.raises(ValueError, match="url: no list of models at"):
            await Client(bad, {}, 1.0, False).send(trace)


@pytest.mark.parametrize(("models", "code"), [(("whole", "refused"), 0), (("refused", "cut"), 1)])
def test_who_has_no_answer_at_all_is_told_by_the_exit_code(url, tmp_path, models, code):
    rows = "".join(f"0,{name},3,2\n" for name in models)
    (tmp_path / "t.csv").write_text("arrival,model,prompt_tokens,output_tokens\n" + rows)
    done = paceline("bench", "--url", url, "--trace", "t.csv", "--out", "r", cwd=tmp_path)
    assert done.returncode == code and "1 times: 429" in done.stderr and (tmp_path / "r/report.json").exists()


@pytest.mark.parametrize(("status", "code"), [(503, 1), (500, 1), (404, 2), (401, 2)])
def test_a_server_that_fails_is_no_bad_input(server, url, tmp_path, status, code):
    (tmp_path / "t.csv").write_text("arrival,model,prompt_tokens,output_tokens\n0,whole,3,2\n")
    server.status = status
    done = paceline("bench", "--url", url, "--trace", "t.csv", "--out", "r", cwd=tmp_path)
    assert done.returncode == code and len(done.stderr.splitlines()) == 1
    assert f"{url}/v1/models" in done.stderr and str(status) in done.stderr
