"""What is imported is no garbage."""

import gc
import subprocess
import sys

import pytest

from paceline.cli import main as command
from paceline.cli.lasting import lasting
from paceline.runtime.fork_server import ForkServer


def test_nobody_looks_for_garbage_among_imports():
    code = "import gc, paceline.cli.main as m; m.app(); assert gc.isenabled() and gc.get_freeze_count() > 1e5; m.main()"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("paceline "), done.stderr


def test_the_collector_is_as_it_was():
    with pytest.raises(KeyError), lasting():
        assert not gc.isenabled()
        with lasting():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize(
    "words, starts", [(["serve", "m"], True), (["serve", "m", "--ray", "auto"], False), (["plan", "serve"], False)]
)
def test_workers_import_while_their_server_does(words, starts, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    monkeypatch.setattr(ForkServer, "start", lambda server: seen.append(server.module))
    monkeypatch.setattr(command, "app", lambda: lambda: seen.append("app"))
    command.main()
    assert seen == ["paceline.cli.worker"] * starts + ["app"]
