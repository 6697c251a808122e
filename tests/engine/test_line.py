"""Tensors by memory that two workers share: all of them, in order, whoever is faster."""

import threading
import time

import pytest
import torch

from paceline.engine import exchange, line

pytestmark = pytest.mark.skipif(not exchange.possible(), reason="needs x86 and Linux")


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """Of a line with so little room that it goes round often."""
    monkeypatch.setattr(line, "RING", 10_000)
    monkeypatch.setattr(line, "PIECE", 3_000)
    door = line.Door(tmp_path / "door")
    ends = [line.call(tmp_path / "door"), door.open()]
    assert not list(tmp_path.iterdir())
    yield ends
    for end in ends:
        end._socket.close()


@pytest.mark.parametrize("slow", [None, "sender", "receiver"])
def test_everything_arrives_in_order(ends, slow):
    sizes = torch.randint(1, 4000, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    sent = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]

    def send():
        for n, x in enumerate(sent):
            ends[0].send(x)
            if slow == "sender" and n % 10 == 0:
                time.sleep(1e-3)

    thread = threading.Thread(target=send)
    thread.start()
    for n, x in enumerate(sent):
        if slow == "receiver" and n % 10 == 0:
            time.sleep(1e-3)
        got = torch.full_like(x, torch.nan)
        ends[1].receive(got)
        assert torch.equal(got, x), n
    thread.join()


def test_one_who_waits_for_somebody_who_is_gone_hears_of_it(ends):
    sender, receiver = ends
    sender.send(torch.ones(5))
    sender._socket.close()
    receiver.receive(x := torch.zeros(5))
    assert x.sum() == 5
    with pytest.raises(ConnectionError):
        receiver.receive(x)
