"""The floor of a step."""

from paceline.core.batch import StepShape
from paceline.latency.roofline import Roofline


def test_bytes_and_operations_of_a_hybrid_step():
    floor = Roofline(
        weight_bytes=1000, token_flop=500, emit_flop=70, pair_flop=3, kv_bytes=8, bandwidth=100.0, peak=50.0
    )
    shape = StepShape().add(9, 1, True).add(4, 3, False)  # 10 pairs; 5 + 6 + 7 pairs
    assert floor.bytes(shape) == 1000 + 8 * (9 + 4 + 4)
    assert floor.flop(shape) == 4 * 500 + 70 + 3 * (10 + 18)
    assert floor.seconds(shape) == (floor.bytes(shape) / 100, floor.flop(shape) / 50)


def test_a_step_reads_the_experts_that_its_tokens_choose():
    floor = Roofline(
        weight_bytes=1000, token_flop=1, emit_flop=1, pair_flop=1, kv_bytes=0, bandwidth=1.0, peak=1.0,
        expert_bytes=800, expert_share=0.25,
    )  # fmt: skip
    read = [floor.bytes(StepShape().add(0, tokens, True)) for tokens in (1, 2, 1000)]
    assert read == [200 + 200, 200 + 350, 1000]
