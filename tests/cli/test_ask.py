"""Commands that ask a server end with 1 where it cannot answer, and with 2 where they asked for what it has not."""

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.cli.command import paceline

CHAT = ["chat", "x", "--model", "a", "--url"]
COMMANDS = {
    "chat": CHAT,
    "bench": ["bench", "--trace", "trace.csv", "--out", "out", "--url"],
    "plan": ["plan", "fleet.yaml", "--watch"],
    "profile": ["profile", "fleet.yaml", "--out", "profile.json", "--live"],
}
STREAMS = {
    "cut": 'data: {"choices": [{"delta": {"content": "so far"}}]}\n\n',
    "fault": 'data: {"error": {"message": "the worker is gone"}}\n\n',
    "whole": 'data: {"choices": [{"delta": {"content": "all of it"}}]}\n\ndata: [DONE]\n\n',
    "none": '{"data": []}',
    "list": "[]",
}


class Answer(BaseHTTPRequestHandler):
    """The first part of the path says what: a status, or how a stream ends."""

    def do_GET(self) -> None:
        what = self.path.split("/")[1]
        self.send_response(200 if what in STREAMS else int(what))
        self.end_headers()
        self.wfile.write(STREAMS.get(what, "").encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("command", "status", "code"),
    [(command, *one) for command in COMMANDS for one in ((503, 1), (404, 2))]
    + [("chat", 500, 1), ("chat", 429, 1), ("chat", 401, 2)],
)
def test_whose_fault_it_is(command, status, code, url, tmp_path):
    (tmp_path / "trace.csv").write_text("arrival,model,prompt_tokens,output_tokens\n0,a,3,2\n")
    (tmp_path / "fleet.yaml").write_text("models:\n  - {name: a, source: builtin:coder}\n")
    done = paceline(*COMMANDS[command], f"{url}/{status}", cwd=tmp_path)
    assert done.returncode == code and str(status) in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("stream", "words"),
    [("cut", "the server went away in the middle of an answer"), ("fault", "the worker is gone")],
)
def test_an_answer_that_does_not_come_to_its_end(stream, words, url):
    done = paceline(*CHAT, f"{url}/{stream}")
    assert done.returncode == 1 and done.stderr == f"paceline: {url}/{stream}: {words}\n"


@pytest.mark.parametrize("path", ["whole", "whole/v1", "whole/v1/"])
def test_the_url_may_be_the_apis(path, url, monkeypatch):
    """As `serve` prints it."""
    asked = []
    monkeypatch.setattr(Answer, "log_message", lambda self, *_: asked.append(self.path))
    done = paceline(*CHAT, f"{url}/{path}")
    assert (done.returncode, done.stdout, asked) == (0, "all of it\n", ["/whole/v1/chat/completions"]), done.stderr


@pytest.mark.parametrize("models", ["none", "list"])
def test_who_has_no_models(models, url):
    done = paceline("chat", "x", "--url", f"{url}/{models}")
    assert done.returncode == 2 and done.stderr == f"paceline: url: no list of models at {url}/{models}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_that_is_none_is_not_told_but_named(command, url, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_API_KEY", "secret\n")
    (tmp_path / "trace.csv").write_text("arrival,model,prompt_tokens,output_tokens\n0,a,3,2\n")
    (tmp_path / "fleet.yaml").write_text("models:\n  - {name: a, source: builtin:coder}\n")
    done = paceline(*COMMANDS[command], url, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.endswith(": api-key: a key must be printable ASCII, on one line\n")
    assert done.stderr.count("\n") == 1 and "secret" not in done.stderr


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:99999", "http://[::1"])
def test_a_url_that_is_none(wrong):
    done = paceline(*CHAT, wrong)
    assert done.returncode == 2 and done.stderr.startswith(f"paceline: url: {wrong!r} is not like http://HOST:PORT: ")


def test_names_are_no_markup(url, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    done = paceline("chat", "--model", "a[/x]", "--url", url)
    assert done.returncode == 0 and done.stderr == f"a[/x] at {url}; Ctrl-D ends\n"


def test_who_does_not_speak_http(url, monkeypatch):
    monkeypatch.setattr(Answer, "send_response", lambda self, _: self.wfile.write(b"SSH-2.0\r\n"))
    done = paceline(*CHAT, url)
    assert done.returncode == 2 and f"url: no server answers at {url}" in done.stderr
