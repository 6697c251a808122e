import gc


def pytest_collection_finish() -> None:
    """What is imported and collected stays: garbage collections in the middle of tests need not look at it."""
    gc.collect()
    gc.freeze()
