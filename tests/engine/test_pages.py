"""Memory in large pages."""

import pytest
import torch

from paceline.engine import pages


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
