"""A server over the fake fleet as its own process, for the tests of signals: prints its URL, exits 0 when drained."""

import asyncio
import sys

import uvloop

from paceline.server.serve import bind, serve
from tests.server.conftest import build, make_tokenizer


async def main() -> int:
    server = build(make_tokenizer(), step_s=0.02)
    drained = await serve(server.app, server.fleet, bind("127.0.0.1", 0), on_started=lambda url: print(url, flush=True))
    print("drained" if drained else "forced", flush=True)
    return 0 if drained else 1


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main()))
