"""`paceline chat` against the real server, and `paceline` itself."""

import io

import pytest

from paceline import __version__
from tests.cli.command import paceline


def test_chat_streams_an_answer(server):
    done = paceline("chat", "import os", "--url", server.url, "--max-tokens", "12", "--temperature", "0")
    assert done.returncode == 0 and done.stdout.strip()


def test_a_conversation_goes_on_until_the_input_ends(server, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x\ny\n"))
    done = paceline("chat", "--url", server.url, "--max-tokens", "4", "--temperature", "0", "--model", "coder-draft")
    assert done.returncode == 0 and done.stdout.count("> ") == 3 and "coder-draft" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--url", "nonsense"], "http://HOST:PORT"),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    done = paceline("chat", "x", *arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_an_unknown_model_is_named(server):
    done = paceline("chat", "x", "--url", server.url, "--model", "nobody")
    assert done.returncode == 2 and "nobody" in done.stderr


def test_help_shows_examples_and_the_version():
    assert paceline("--version").stdout.strip() == f"paceline {__version__}"
    for command in ("serve", "chat"):
        assert "Example: paceline" in paceline(command, "--help").stdout
