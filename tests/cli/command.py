"""The command `paceline`, run in this process: to start one takes seconds of imports."""

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from paceline.cli.main import main


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def paceline(*arguments: str, cwd: Path = Path()) -> Done:
    """What it would print to a terminal 150 columns wide, and its exit code."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "argv", ["paceline", *arguments]),
        patch.dict(os.environ, COLUMNS="150"),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())
