"""Memory that calls share."""

from __future__ import annotations

import torch

from minispec.native.scratch import Scratch


def test_rows_lie_in_one_place() -> None:
    scratch = Scratch(8, torch.bfloat16)
    many, address = scratch(5)
    few, same = scratch(2)
    assert many.shape == (5, 8) and few.shape == (2, 8) and few.dtype == torch.bfloat16
    assert address == same == many.data_ptr() == few.data_ptr()
    assert scratch(5)[0] is many


def test_more_rows_than_before_find_room() -> None:
    scratch = Scratch(8, torch.float32)
    scratch(2)[0].fill_(1.0)
    for rows in (7, 2, 7, 0):
        view, address = scratch(rows)
        assert view.shape == (rows, 8) and address == scratch(7)[1]
        view.fill_(2.0)


def test_what_is_large_is_not_kept() -> None:
    scratch = Scratch(1 << 20, torch.float32)
    small, _ = scratch(1)
    large, address = scratch(5)
    assert large.shape == (5, 1 << 20) and address == large.data_ptr() != small.data_ptr()
    assert scratch(5)[0] is not large and scratch(1)[0] is small
