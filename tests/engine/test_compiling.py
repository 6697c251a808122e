"""Only one process compiles kernels at a time."""

import select
import subprocess
import sys

HOLD = """
import sys
from paceline.engine.compiling import one_process_at_a_time
with one_process_at_a_time():
    print("in", flush=True)
    sys.stdin.readline()
    print("out", flush=True)
"""


def test_a_second_process_waits_for_the_first():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen([sys.executable, "-c", HOLD], **pipes)
    assert first.stdout.readline() == "in\n"
    second = subprocess.Popen([sys.executable, "-c", f"print('here', flush=True)\n{HOLD}"], **pipes)
    assert second.stdout.readline() == "here\n"
    assert not select.select([second.stdout], [], [], 0.5)[0], "it did not wait"
    assert first.communicate("\n")[0] == "out\n"
    assert second.communicate("\n")[0] == "in\nout\n"
