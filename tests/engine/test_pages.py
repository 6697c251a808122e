"""Memory in large pages."""

import itertools

import pytest
import torch

from paceline.engine import pages
from paceline.engine.config import ModelConfig
from paceline.engine.host import resident_bytes
from paceline.engine.linear import kernels
from paceline.engine.model import load_decoder
from paceline.engine.weights import Checkpoint
from tests.engine import checkpoints


def test_it_is_zeros_that_can_be_written():
    for shape in ((), (0, 4), (3, 5), (3000, 2000)):
        tensor = pages.zeros(shape)
        assert tensor.shape == shape and not tensor.any()
        assert pages.zeros((3,), torch.int8).dtype == torch.int8
    tensor[2999, 1999] = 2.5
    assert tensor.sum() == 2.5


def test_the_system_is_asked_for_large_pages():
    """By the flags of the mapping: whether there are any depends on what else the machine holds."""
    tensor, here = pages.zeros((16 << 20,), torch.uint8), False
    with open("/proc/self/smaps") as file:
        for name, *values in map(str.split, file):
            if "-" in name and not name.endswith(":"):
                begin, end = (int(part, 16) for part in name.split("-"))
                here = begin <= tensor.data_ptr() < end
            elif here and name == "VmFlags:":
                assert "hg" in values and "sh" not in values, "large, and private: shared memory has small ones"
                return
    pytest.skip("this system does not tell")


def test_small_ones_share_large_pages_while_they_are_made_side_by_side():
    count = 1 << 18
    with pages.side_by_side():
        tensors = [pages.zeros((count + i,)) for i in range(200)]  # a MiB each, in more than one mapping
        whole = pages.zeros((pages.SHARED // 4 + 1,))
    for i, tensor in enumerate(tensors):
        assert tensor.shape == (count + i,) and tensor.data_ptr() % 64 == 0 and not tensor.any()
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(tensors)) and not whole.any()
    begins = [tensor.data_ptr() for tensor in tensors]
    apart = [after - begin for begin, after in itertools.pairwise(begins)]
    assert sum(4 * count <= distance < 4 * count + 4096 for distance in apart) >= 190
    assert begins[0] % pages.LARGE == 0 == whole.data_ptr() % pages.LARGE
    alone = [pages.zeros((count,)).data_ptr() for _ in range(3)]
    assert all(begin % pages.LARGE == 0 for begin in alone)


def test_the_system_has_pages_back_that_were_one_tensors_alone():
    with pages.side_by_side():
        first, middle, last = (pages.zeros((5 << 20,), torch.uint8).fill_(7) for _ in range(3))
    before = resident_bytes()
    pages.give_back(middle)
    assert before - resident_bytes() == pytest.approx(4 << 20, rel=0.01)
    assert (first == 7).all() and (last == 7).all()


@pytest.mark.skipif(kernels is None or not kernels.HAS_TILES, reason="torch has them")
def test_weights_of_a_model_lie_side_by_side(tmp_path):
    checkpoints.save("qwen2", tmp_path)
    decoder = load_decoder(Checkpoint(tmp_path), ModelConfig.load(tmp_path), kind="tiled")
    parts = [part for layer in decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    begins = sorted(part.packed.data_ptr() for part in [*parts, decoder.head])
    assert begins[-1] - begins[0] < 2 * sum(part.nbytes for part in [*parts, decoder.head]) + 8192 * len(begins)
