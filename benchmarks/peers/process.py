"""An engine as a process of its own, in an environment of its own, stopped while it is not asked."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import ROOT

ENVIRONMENTS = ROOT / ".bench" / "peers"
BUILD = {
    "CMAKE_BUILD_PARALLEL_LEVEL": "1",
    "CMAKE_ARGS": "-DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAVA_BUILD=OFF",
}
LONGEST = 2 * 3600  # seconds to wait for an answer


class Cannot(Exception):
    """Why an engine has no number."""


def environment(module: str) -> Path:
    """The interpreter that runs `benchmarks.peers.MODULE`, made from MODULE.txt on first use; without one, this one."""
    lock = Path(__file__).with_name(f"{module}.txt")
    if not lock.exists():
        return Path(sys.executable)
    folder = ENVIRONMENTS / module / "venv"
    made_from = folder / "lock.txt"
    if not made_from.exists() or made_from.read_text() != lock.read_text():
        print(f"  {module}: installing", flush=True)
        install = [folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "-r", lock]
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            subprocess.run(install, check=True, env=os.environ | BUILD, stderr=subprocess.PIPE, text=True)
        except subprocess.CalledProcessError as error:
            raise Cannot(f"not installed: {(error.stderr or str(error)).strip()[-500:]}") from None
        shutil.copy(lock, made_from)
    return folder / "bin" / "python"


class Process:
    """A loaded engine. Raises Cannot when it does not get that far; its standard error is `.bench/peers/NAME.log`."""

    def __init__(self, name: str, module: str, options: dict, checkpoint: Path, precision: str) -> None:
        cache = ENVIRONMENTS / module
        cache.mkdir(parents=True, exist_ok=True)
        what = [str(checkpoint), precision, json.dumps(options), str(cache)]
        self.log = ENVIRONMENTS / f"{name.replace(' ', '-')}.log"
        program = environment(module)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [program, "-m", f"benchmarks.peers.{module}", *what],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                text=True,
                start_new_session=True,  # what it starts is stopped with it
            )
        try:
            self.about = self._answer()["about"]
        except Cannot:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, prompts: list[list[int]], outputs: list[int]) -> dict[str, Any]:
        """The answer of `child`. Raises Cannot with the engine's reason, or because it ended."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: there is no answer either
            self.process.stdin.write(json.dumps({"prompts": prompts, "outputs": outputs}) + "\n")
            self.process.stdin.flush()
        try:
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], LONGEST)
        if not ready:
            raise Cannot(f"no answer in {LONGEST} s")
        line = self.process.stdout.readline()
        if not line:
            raise Cannot(f"it ended; last line of {self.log.name}: {(self.log.read_text().splitlines() or [''])[-1]}")
        answer = json.loads(line)
        if "cannot" in answer:
            raise Cannot(answer["cannot"])
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)
