"""A program that a fork server imports: its processes do what they are told."""

import json
import os
import signal
import socket

import numpy as np
from numba import njit, prange

prepared: list[int] = []


@njit(parallel=True)
def twice(numbers):
    for i in prange(len(numbers)):
        numbers[i] *= 2


def prepare() -> None:
    twice.compile("void(int64[::1])")  # by now Numba's threads would be launched
    prepared.append(os.getpid())


def main(arguments: list[str]) -> None:
    word, descriptor = arguments
    numbers = np.arange(100)
    twice(numbers)
    told = {"pid": os.getpid(), "parent": os.getppid(), "prepared": prepared, "sum": int(numbers.sum()), "word": word}
    with socket.socket(fileno=int(descriptor)) as front_end:
        front_end.sendall(json.dumps(told).encode())
        front_end.recv(1)
    if word == "fall":
        os.kill(os.getpid(), signal.SIGUSR2)
    raise SystemExit(int(word))
