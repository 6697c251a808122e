"""Memory in large pages."""

import torch

from paceline.engine import pages


def test_it_is_zeros_that_can_be_written():
    for shape in ((), (0, 4), (3, 5), (3000, 2000)):
        tensor = pages.zeros(shape)
        assert tensor.shape == shape and not tensor.any()
        assert pages.zeros((3,), torch.int8).dtype == torch.int8
    tensor[2999, 1999] = 2.5
    assert tensor.sum() == 2.5


def test_large_pages_are_given_where_the_system_has_them():
    setting = "/sys/kernel/mm/transparent_hugepage/enabled"
    try:
        with open(setting) as file:
            offered = "[never]" not in file.read()
    except OSError:
        offered = False
    tensor = pages.zeros((16 << 20,), torch.uint8).fill_(1)
    here, large = False, 0
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                here = begin <= tensor.data_ptr() < end
            elif here and first == "AnonHugePages:":
                large = int(line.split()[1])
    assert large >= 8 << 10 or not offered
