"""Fingerprints as computed on a GPU, tested on the available device."""

import pytest
import torch

from stormtorch.runtime.memory.fingerprints import sums

pytestmark = pytest.mark.pure
KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 5000])
def test_a_fingerprint_sees_what_changes_and_what_changes_places(dtype: torch.dtype, count: int) -> None:
    memory = (torch.arange(count + 1) % 97 % (2 if dtype is torch.bool else 97)).to(dtype)
    values = memory[1:]  # where no word of 8 bytes begins
    print_of_all = sums(values)
    assert torch.equal(sums(values.clone()), print_of_all)
    for place in {0, count // 2, count - 1} if count else ():
        changed = values.clone()
        changed[place] = changed[place].logical_not() if dtype is torch.bool else changed[place] + 1
        assert not torch.equal(sums(changed), print_of_all)
    for one, other in [(0, 1), (0, 256)] if count > 256 else []:
        swapped = values.clone()
        swapped[one], swapped[other] = values[other].clone(), values[one].clone()
        if not torch.equal(swapped, values):
            assert not torch.equal(sums(swapped), print_of_all)
