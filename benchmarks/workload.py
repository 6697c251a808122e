"""The mixed workload that every engine gets: 32 requests, prompts of 64 to 1024 tokens, outputs of 16 to 128."""

from random import Random

from paceline.core.request import SamplingParams

LENGTHS = [
    (768, 16), (64, 16), (64, 128), (96, 16), (384, 32), (64, 16), (64, 48), (768, 96),
    (768, 32), (96, 32), (96, 16), (1024, 64), (192, 16), (1024, 64), (96, 96), (96, 96),
    (64, 48), (1024, 16), (256, 64), (384, 48), (192, 128), (192, 64), (1024, 128), (64, 96),
    (96, 16), (384, 32), (768, 128), (512, 32), (64, 16), (768, 32), (96, 96), (192, 32),
]  # fmt: skip


def prompts(vocabulary: int) -> list[list[int]]:
    """Token ids; a seed a request, so that a part of the workload is the same part everywhere."""
    low, high = (300, 8000) if vocabulary > 8000 else (3, vocabulary)
    result = []
    for index, (length, _) in enumerate(LENGTHS):
        rng = Random(9000 + index)
        result.append([rng.randrange(low, high) for _ in range(length)])
    return result


def outputs() -> list[int]:
    return [output for _, output in LENGTHS]


def greedy(tokens: int) -> SamplingParams:
    """Exactly so many tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
