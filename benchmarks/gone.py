"""A worker on a device that is gone: ends as soon as it begins (for `faults`)."""

import os


def prepare() -> None:
    pass


def main(arguments: list[str]) -> None:
    os._exit(9)
