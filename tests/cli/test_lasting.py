"""What is imported is no garbage."""

import gc
import subprocess
import sys

import pytest

from paceline.cli.lasting import lasting


def test_nobody_looks_for_garbage_among_imports():
    code = "import gc, paceline.cli.main as m; assert gc.isenabled() and gc.get_freeze_count() > 100_000; m.main()"
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
