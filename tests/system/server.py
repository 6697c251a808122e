"""The real server in a process of its own, on a free port."""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

CACHE = tempfile.mkdtemp(prefix="paceline-cache-")  # no profile of the developer's machine has a say
atexit.register(shutil.rmtree, CACHE)


class Server:
    """`paceline serve ARGUMENTS`; use as a context manager. `log` is what it wrote so far."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "paceline.cli.main", "serve", "--port", "0", "--num-blocks", "256", *arguments]
        environment = {"COLUMNS": "160", "XDG_CACHE_HOME": CACHE} | environment
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
        self.log: list[str] = []
        self.url = ""
        self._up = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Server":
        assert self._up.wait(90) and self.url, "\n".join(self.log)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if found := re.search(r"ready in .* at (http://\S+)/v1", line):
                self.url = found.group(1)
                self._up.set()
        self.process.stderr.close()
        self._up.set()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """Sum over the samples of a metric."""
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics")[1], re.M)
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        return [pid for pid, line in lines.items() if line.startswith(b"paceline.cli.worker")]


def until(condition, seconds: float = 20.0) -> None:
    """Waits for something that must happen soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
