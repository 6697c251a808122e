import gc

from hypothesis import settings

settings.register_profile("same", derandomize=True, database=None)  # the same cases every time, and nothing left over
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """What is imported and collected stays: garbage collections in the middle of tests need not look at it."""
    gc.collect()
    gc.freeze()
