"""Sizes as people write them."""

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_bytes(text: str, key: str = "memory") -> int:
    """Bytes of 6GiB, 512MB (taken as MiB), 1073741824."""
    number = text.strip().removesuffix("B").removesuffix("i")
    unit = number[-1:].upper() if number[-1:].isalpha() else ""
    try:
        return int(float(number.removesuffix(number[-1:]) if unit else number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{key}: {text!r} is not a size such as 6GiB or 512MiB") from None
