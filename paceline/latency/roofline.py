"""The floor of a step: what must be read and computed, over what the machine gives."""

from dataclasses import dataclass

from paceline.core.batch import StepShape


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model's sizes and a machine's rates (Williams et al., 2009). Bytes, operations, and both a second."""

    weight_bytes: int  # read once a step, the head included; of experts only those that are chosen
    token_flop: int  # of layers, for one token: two a weight it meets; of the last one only queries, keys and values
    emit_flop: int  # of the rest of the last layer and the head, for one row
    pair_flop: int  # of attention, for one query-key pair: four a head's element, in all layers before the last
    kv_bytes: int  # of a token, key and value in all layers
    bandwidth: float
    peak: float
    expert_bytes: int = 0  # of weight_bytes, what lies in experts
    expert_share: float = 1.0  # of a layer's experts, those that a token is sent to
    working_bytes: int = 0  # of the process, beside weights, keys and values: its largest step, and itself
    table_bytes: int = 0  # of the embedding, where it is held: a step reads the rows of its tokens

    def bytes(self, shape: StepShape) -> int:
        """Weights once, the keys and values of all contexts once, those of the new tokens written.

        Of experts those that are to be expected where every token chooses by itself and all are equally likely. Tokens
        that agree on theirs need fewer: then this is above the floor.
        """
        weights = self.weight_bytes - int(self.expert_bytes * (1.0 - self.expert_share) ** shape.tokens)
        return weights + self.kv_bytes * (shape.decode_context + shape.chunk_context + shape.tokens)

    def flop(self, shape: StepShape) -> int:
        pairs = shape.decode_context + shape.decodes + shape.chunk_pairs
        return self.token_flop * shape.tokens + self.emit_flop * shape.emits + self.pair_flop * pairs

    def seconds(self, shape: StepShape) -> tuple[float, float]:
        """The least that the bytes take, and the least that the operations take."""
        return self.bytes(shape) / self.bandwidth, self.flop(shape) / self.peak
