"""The command `paceline`. Exit codes: 0 done, 2 bad input (one line names it), 1 anything else (one line names a
file that could not be used, or a server that could not answer)."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from errno import ENOSPC, EPIPE
from functools import cache

from paceline.cli.lasting import lasting
from paceline.runtime.fork_server import fork_server


@cache
def app() -> Callable[[], int | None]:
    with lasting():
        from paceline.cli.app import run
    return run


def main() -> None:
    if sys.argv[1:2] == ["serve"] and not any(word.startswith("--ray") for word in sys.argv):
        with suppress(OSError):  # who needs it will say so
            fork_server("paceline.cli.worker").start()  # imports what workers need, while we import what a server needs
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of what the locale has no letters for
    try:
        code = app()()
        print(end="", flush=True)
        if code:
            sys.exit(code)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None and error.errno not in (ENOSPC, EPIPE):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"paceline: {where}{error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what was not printed will not be at the end either
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
