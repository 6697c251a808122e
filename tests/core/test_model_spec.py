"""What fits in memory."""

import pytest

from paceline.core.model_spec import ModelSpec


@pytest.mark.parametrize(("length", "batch"), [(1024, 26), (2048, 13), (3072, 8)])
def test_the_largest_batch_is_sarathis(length, batch):
    """LLaMA-13B on an A6000 (SARATHI, 2023, section 4.3.1): 40 layers of 5,120 numbers, twice, two bytes each."""
    model = ModelSpec("llama-13b", 26 * 10**9, 40 * 5120 * 2 * 2, 4096)
    assert model.max_sequences(48 * 10**9, length) == batch
    assert model.max_sequences(10**9, length) == 0
