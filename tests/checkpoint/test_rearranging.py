"""What an operation does with elements is found out on stand-ins, or said to be unknown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetmem.checkpoint.conversions import NotFollowedError, Rearranging

SHAPE = (4, 6, 10)

FOLLOWED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "one as it is": lambda given: given[0],
    "contiguous": lambda given: given[0].transpose(0, 2).contiguous(),
    "stacked": lambda given: torch.stack(given, dim=0),
    "stacked within": lambda given: torch.stack(given, dim=1),
    "stacked last": lambda given: torch.stack(given, dim=-1),
    "joined": lambda given: torch.cat(given, dim=0),
    "joined last": lambda given: torch.cat(given, dim=-1),
    "of different lengths": lambda given: torch.cat([given[0], given[1][:2], given[2][1:, :, :]]),
    "stacked, then joined": lambda given: torch.cat([torch.stack(given[:2]), torch.stack(given[2:])], dim=1),
    "joined, then turned": lambda given: torch.cat(given, dim=1).transpose(0, 1).contiguous(),
    "turned, then joined": lambda given: torch.cat([each.permute(2, 0, 1) for each in given], dim=2),
    "turned on the way": lambda given: torch.stack([torch.cat(given[:2]).mT, torch.cat(given[2:]).mT]),
    "a part": lambda given: torch.chunk(given[1], 2, dim=0)[1].contiguous(),
    "a part within": lambda given: torch.split(given[1], [2, 4], dim=1)[1],
    "a part of the last": lambda given: given[2].narrow(1, 1, 3).transpose(0, 1),
    "parts of parts": lambda given: torch.cat([given[0].chunk(2, dim=1)[1], given[3].chunk(2, dim=1)[0]], dim=1),
    "unbound": lambda given: torch.stack(torch.unbind(given[0], dim=0)[::-1]),
    "other dimensions": lambda given: given[0].reshape(24, 10),
    "joined in other dimensions": lambda given: torch.cat(given).view(16, 60),
    "joined in more dimensions": lambda given: torch.cat(given).view(4, 4, 6, 10),
    "none of it": lambda given: torch.cat([given[0][:0], given[1]]),
    "joined with channels last": lambda given: torch.cat([_channels_last(each) for each in given[:2]]),
    "joined with channels last, then turned": lambda given: torch.cat([_channels_last(given[0])] * 2).permute(
        1, 0, 3, 2
    ),
    "the same twice": lambda given: torch.stack([given[0], given[0]]),
}


def _channels_last(tensor: Tensor) -> Tensor:
    """Equal dimensions: no view of it would fail that takes one for another."""
    return tensor.reshape(-1)[:216].view(8, 3, 3, 3).permute(0, 3, 1, 2)


UNKNOWN: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "new values": lambda given: given[0] + given[1],
    "new values in place": lambda given: torch.stack([given[0].mul_(2), given[1]]),
    "new values of what was joined": lambda given: torch.cat(given).neg_(),
    "another dtype": lambda given: given[0].double(),
    "merged across": lambda given: given[0].view(4, 3, 2, 10).transpose(1, 2).reshape(SHAPE),
    "a part of what was joined": lambda given: torch.cat(given)[:4],
    "single elements": lambda given: given[0][..., ::2],
    "joined by other means": lambda given: torch.vstack(given),
    "bits of another dtype": lambda given: given[0].view(torch.int32),
    "bits of another dtype, joined": lambda given: torch.cat(given).view(torch.int32),
    "negated by a view": lambda given: torch._neg_view(given[0]),
    "new values through data": lambda given: torch.stack([given[0].data.mul_(2), given[1]]),
    "new values through data of what was joined": lambda given: (made := torch.cat(given), made.data.zero_())[0],
    "other strides": lambda given: given[0].mT.contiguous().as_strided(SHAPE, (60, 10, 1)),
}


def _given() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(SHAPE, generator=generator) for _ in range(4)]


def _followed(operation: Callable[[list[Tensor]], Tensor], into: Tensor) -> Tensor:
    """`into`, filled by what was found out about `operation` alone."""
    given = _given()
    rearranging = Rearranging([(SHAPE, torch.float32)] * len(given))
    with rearranging:
        made = operation(rearranging.stand_ins)
    assert made.is_meta
    assert made.shape == into.shape
    for run in rearranging.runs(made, into):
        elements = given[run.number].reshape(-1)[run.first : run.first + run.into.numel()]
        run.into.copy_(elements.view(run.into.shape))
    return into


@pytest.mark.parametrize("name", FOLLOWED)
def test_every_element_arrives_where_the_operation_puts_it(name: str) -> None:
    expected = FOLLOWED[name](_given())
    assert torch.equal(_followed(FOLLOWED[name], torch.full(expected.shape, -1.0)), expected)
    turned = torch.full(expected.shape[::-1], -1.0).permute(*reversed(range(expected.dim())))
    if name == "joined in more dimensions":  # which do not lie together here
        with pytest.raises(NotFollowedError):
            _followed(FOLLOWED[name], turned)
    else:
        assert torch.equal(_followed(FOLLOWED[name], turned), expected)


def test_where_no_versions_are_counted_it_is_followed_too() -> None:
    expected = torch.cat(_given())
    with torch.inference_mode():
        assert torch.equal(_followed(torch.cat, torch.empty(expected.shape)), expected)


def test_parts_of_other_dimensions_are_not_followed() -> None:
    with pytest.raises(NotFollowedError):  # torch leaves out what has no elements and one dimension
        _followed(lambda given: torch.cat([given[0].view(-1)[:0], given[1]]), torch.empty(SHAPE))


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_more_than_a_move_is_not_followed(name: str) -> None:
    with pytest.raises(NotFollowedError):
        _followed(UNKNOWN[name], torch.empty(UNKNOWN[name](_given()).shape))
