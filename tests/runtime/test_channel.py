"""The socket pair between the front end and a worker."""

import asyncio
import socket

from paceline.runtime.channel import FrontEnd, WorkerEnd


async def test_what_is_sent_before_the_connection_is_there_is_not_lost():
    """As a model that is to be loaded while its workers are being started."""
    ours, theirs = socket.socketpair()
    channel, worker = FrontEnd(lambda frame: None), WorkerEnd(theirs.detach())
    worker._socket.settimeout(10)
    channel.send(b"early")
    await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
    channel.send(b"late")
    assert [await asyncio.to_thread(worker.receive) for _ in range(2)] == [b"early", b"late"]
    channel.close()
    assert await asyncio.to_thread(worker.receive) is None
    worker._socket.close()
