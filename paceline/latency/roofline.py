"""The floor of a step: what must be read and computed, over what the machine gives."""

from dataclasses import dataclass

from paceline.core.batch import StepShape


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model's sizes and a machine's rates (Williams et al., 2009). Bytes, operations, and both a second."""

    weight_bytes: int  # read once a step, the head included
    token_flop: int  # of all layers, for one token: two a weight
    emit_flop: int  # of the head, for one row
    pair_flop: int  # of attention, for one query-key pair: four a head's element, in all layers
    kv_bytes: int  # of a token, key and value in all layers
    bandwidth: float
    peak: float

    def bytes(self, shape: StepShape) -> int:
        """Weights once, the keys and values of all contexts once, those of the new tokens written."""
        return self.weight_bytes + self.kv_bytes * (shape.decode_context + shape.chunk_context + shape.tokens)

    def flop(self, shape: StepShape) -> int:
        pairs = shape.decode_context + shape.decodes + shape.chunk_pairs
        return self.token_flop * shape.tokens + self.emit_flop * shape.emits + self.pair_flop * pairs

    def seconds(self, shape: StepShape) -> tuple[float, float]:
        """The least that the bytes take, and the least that the operations take."""
        return self.bytes(shape) / self.bandwidth, self.flop(shape) / self.peak
