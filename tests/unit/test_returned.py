"""What is lent is copied, once each and to the device that is asked for; all else is returned as it is."""

from __future__ import annotations

import torch

from fxoffload.returned import copy_lent, lies_in
from fxoffload.storages import storage_of
from tests.wrapped import Scaled

CPU, META = torch.device("cpu"), torch.device("meta")
LENT = torch.arange(12.0).reshape(3, 4)


def is_lent(tensor: torch.Tensor) -> bool:
    return lies_in(tensor, {storage_of(LENT)})


def test_views_are_copied_once_each() -> None:
    view, other = LENT.t()[1:], torch.ones(3)
    result = copy_lent((view, {"same": view}, [other]), is_lent, CPU)
    assert result[0] is result[1]["same"]
    assert torch.equal(result[0], view)
    assert not is_lent(result[0])
    assert result[2][0] is other
    assert copy_lent(view, is_lent, META).device == META


def test_what_is_not_lent_stays_the_object_that_it_is() -> None:
    for result in (None, "text", [torch.ones(2), {"a": torch.eye(2).to_sparse()}], torch.ones(1, device=META)):
        assert copy_lent(result, is_lent, META) is result


def test_a_wrapper_is_copied_with_its_inner_tensors_bit_for_bit() -> None:
    data = torch.arange(12, dtype=torch.int8).reshape(3, 4)
    wrapper = Scaled(data, LENT[:, :1])
    copied = copy_lent(wrapper, is_lent, CPU)
    assert type(copied) is Scaled
    assert torch.equal(copied.data_, data)
    assert torch.equal(copied.scale, LENT[:, :1])
    assert not is_lent(copied.scale)
