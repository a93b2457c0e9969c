"""Buckets: how gradients are collected into one."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import plan

pytestmark = pytest.mark.pure

SHAPES = [(3, 5), (0,), (7,)]


def bucket_of(dtype: torch.dtype = torch.float32) -> Bucket:
    """Makes a bucket of three parameters, one of them empty."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    (layout,) = plan([each.numel() for each in parameters], dtype.itemsize, 1e6, 2, whole=False)
    return Bucket(0, layout, parameters, 0)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, parameter.numel() + 1).view(parameter.shape).to(parameter.dtype)


def finite_after_collecting(bucket: Bucket) -> bool | None:
    bucket.collect(bucket.grad_views)
    return bucket.finite


def transposed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.t().contiguous().t()


def negative_in_name_only(gradient: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-gradient)  # as torch makes of an imaginary part; the elements in memory have the other sign


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda gradient: gradient,
    "transposed": transposed,
    "sparse": lambda gradient: gradient.to_sparse(),
    "part of a larger one": lambda gradient: torch.stack([gradient, gradient], -1)[..., 0],
    "negative in name only": negative_in_name_only,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [1.0, math.inf, -math.inf, math.nan])
def test_collected_gradients_are_in_their_places_and_infinities_among_them_are_known(
    dtype: torch.dtype, kind: str, odd: float
) -> None:
    bucket = bucket_of(dtype)
    wanted = [gradient_of(each) for each in bucket.parameters]
    large = max(wanted, key=lambda each: each.numel())
    large.view(-1)[-1] = odd
    for parameter, gradient in zip(bucket.parameters, wanted, strict=True):
        parameter.grad = KINDS[kind](gradient.clone()) if gradient is large else gradient.clone()
    assert bucket.collect(bucket.grad_views) == [True, True, True]
    for parameter, view, gradient in zip(bucket.parameters, bucket.grad_views, wanted, strict=True):
        assert parameter.grad is view
        assert torch.equal(view.nan_to_num(nan=-9.0), gradient.nan_to_num(nan=-9.0))
    assert bucket.finite is (None if dtype == torch.float64 else odd == 1.0)


def test_an_infinity_is_found_in_a_gradient_that_is_in_its_place_already() -> None:
    bucket = bucket_of()
    for parameter, view in zip(bucket.parameters, bucket.grad_views, strict=True):
        parameter.grad = view
    assert finite_after_collecting(bucket)
    bucket.grad_views[0].view(-1)[0] = math.inf  # as adding a second gradient to the first one may do
    assert not finite_after_collecting(bucket)


def test_a_parameter_without_a_gradient_leaves_zeros_and_no_infinity_of_an_earlier_one() -> None:
    bucket = bucket_of()
    for parameter in bucket.parameters:
        parameter.grad = torch.full_like(parameter, math.inf)
    assert not finite_after_collecting(bucket)
    for parameter in bucket.parameters:
        parameter.grad = None
    assert bucket.collect(bucket.grad_views) == [False, False, False]
    assert bucket.finite
    assert not bucket.grads.any()
    assert all(parameter.grad is None for parameter in bucket.parameters)


def test_a_gradient_whose_memory_was_replaced_comes_back_into_the_bucket() -> None:
    bucket = bucket_of()
    parameter, view = bucket.parameters[0], bucket.grad_views[0]
    home, parameter.grad = view.data_ptr(), view
    view.data = gradient_of(parameter)
    bucket.collect(bucket.grad_views)
    assert view.data_ptr() == home
    assert torch.equal(bucket.grads[bucket.layout.slots[0].first :][: view.numel()], gradient_of(parameter).view(-1))
