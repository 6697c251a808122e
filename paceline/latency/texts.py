"""The time of a step of whole texts, as encoders take them: by their length and number, as measured."""

from dataclasses import dataclass

Stages = tuple[float, ...]  # seconds in each pipeline stage


@dataclass(frozen=True, slots=True)
class TextTimes:
    """Of one model in one shape."""

    seconds: dict[int, dict[int, Stages]]  # by tokens of each text, then by number of texts

    def at(self, tokens: int) -> dict[int, Stages]:
        """By number of texts of this length: linear between measured lengths, beyond them as at the nearest. Numbers
        that were measured on both sides."""
        lengths = sorted(self.seconds)
        tokens = min(max(tokens, lengths[0]), lengths[-1])
        below = max(length for length in lengths if length <= tokens)
        above = min(length for length in lengths if length >= tokens)
        share = (tokens - below) / (above - below) if above > below else 0.0
        low, high = self.seconds[below], self.seconds[above]
        return {
            count: tuple(a + share * (b - a) for a, b in zip(low[count], high[count], strict=True))
            for count in low
            if count in high
        }
