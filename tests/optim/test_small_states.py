"""Moments in 16 and 8 bits, weights without masters: the bits of the kernels on plain tensors, in every placement."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.cpu import GROUP_ELEMENTS, AdamWStep, prepare_small
from tests.engine.harness import (
    CHUNK,
    CHUNK_ELEMENTS,
    PLACEMENTS,
    STREAMED,
    Tower,
    assert_same,
    assert_same_states,
    assert_same_weights,
    budget,
    loss_of,
    manage,
    token_batches,
)
from tests.optim.stories import OVERLAPS
from tests.pairs import case, mostly

BF16 = torch.bfloat16
SEED = 7
EIGHT_BITS = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")


class Plain:
    """The kernels on ordinary tensors, one after the other: what the managed optimizer must compute."""

    def __init__(self, module: nn.Module, moments: Any) -> None:
        self.parameters = list(module.parameters())
        self.step_count = 0
        self.moments: list[Any] = []
        for p in self.parameters:
            if moments == "8bit":
                groups = -(-p.numel() // GROUP_ELEMENTS)
                codes = [torch.zeros(p.numel(), dtype=kind) for kind in (torch.int8, torch.uint8)]
                self.moments.append([each for one in codes for each in (one, torch.zeros(groups))])
            else:
                self.moments.append([torch.zeros(p.numel(), dtype=moments or p.dtype) for _ in range(2)])

    @torch.no_grad()
    def step(self) -> None:
        self.step_count += 1
        step = AdamWStep(1e-2, 0.9, 0.999, 1e-8, 1e-2, self.step_count)
        for number, (p, moments) in enumerate(zip(self.parameters, self.moments, strict=True)):
            if p.grad is None:
                continue
            flats, key = (p.data.view(-1), p.grad.reshape(-1), moments), (SEED << 32) + number
            for task in prepare_small(*flats, key=key)(step):
                task()


def small(module: nn.Module, placement: str, directory: Path) -> nn.Module:
    """`module` managed in the smallest chunks that its dtype has."""
    return manage(module, placement, directory, chunk_bytes=CHUNK_ELEMENTS * next(module.parameters()).itemsize)


VARIANTS = {
    "bf16 moments": (None, {"moments": BF16}),
    "8-bit moments": (None, {"moments": "8bit"}),
    "no masters": (BF16, {"stochastic_rounding": True}),
    "no masters, 8-bit moments": (BF16, {"moments": "8bit", "stochastic_rounding": True}),
}


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("variant", "overlap"),
    [
        case(variant, overlap, nightly=(at + number) % 2 > 0)
        for at, variant in enumerate(VARIANTS)
        for number, overlap in enumerate(OVERLAPS)
    ],
)
def test_the_bits_are_those_of_the_kernels_wherever_states_live(
    overlap: str, variant: str, placement: str, tmp_path: Path
) -> None:
    dtype, options = VARIANTS[variant]
    torch.manual_seed(0)
    plain = Tower().to(dtype or torch.float32)
    managed = small(copy.deepcopy(plain), placement, tmp_path)
    left = Plain(plain, options.get("moments"))
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, seed=SEED, overlap=overlap, **options)
    for batch in token_batches(4):
        for module, optimizer in ((plain, left), (managed, right)):
            module.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
        assert_same_weights(plain, managed)
    for parameter, moments in zip(managed.parameters(), left.moments, strict=True):
        state = right.state[parameter]
        names = ["exp_avg", "exp_avg_sq"] if len(moments) == 2 else list(EIGHT_BITS)
        for name, moment in zip(names, moments, strict=True):
            assert_same(moment if "scale" in name else moment.view(parameter.shape), state[name], name)


@pytest.mark.parametrize(("variant", "placement"), mostly(VARIANTS, STREAMED))
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(variant: str, placement: str, tmp_path: Path) -> None:
    dtype, options = VARIANTS[variant]
    torch.manual_seed(0)
    batches = token_batches(6)

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, which: slice) -> None:
        for batch in batches[which]:
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()

    through = small(Tower().to(dtype or torch.float32), placement, tmp_path)
    optimizer = hetmem.AdamW(through.parameters(), seed=SEED, **options)
    train(through, optimizer, slice(3))
    saved = copy.deepcopy((through.state_dict(), optimizer.state_dict()))
    train(through, optimizer, slice(3, 6))
    resumed = small(Tower().to(dtype or torch.float32), placement, tmp_path)
    again = hetmem.AdamW(resumed.parameters(), seed=SEED, **options)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(resumed, again, slice(3, 6))
    assert_same_weights(through, resumed)
    assert_same_states(optimizer, again)


@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        (None, {}, 16.5),
        (None, {"moments": BF16}, 12.5),
        (None, {"moments": "8bit"}, 10.5),
        (BF16, {"stochastic_rounding": True, "moments": "8bit"}, 6.5),
    ],
)
def test_a_parameter_takes_no_more_host_memory_than_it_says(
    dtype: torch.dtype | None, options: dict[str, Any], most: float, tmp_path: Path
) -> None:
    """Parameter, gradient and states; chunks of a megabyte, so that rounding to pages is what it is in large models."""
    module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(dtype or torch.float32)
    room = budget("host", tmp_path, device_chunks="8MiB")
    managed = manage(module, room, tmp_path, chunk_bytes=None)
    optimizer = hetmem.AdamW(managed.parameters(), **options)
    managed(torch.ones(2, 512, dtype=dtype or torch.float32)).square().sum().backward()
    optimizer.step()
    assert hetmem.report(managed).to_dict()["bytes_per_parameter"] <= most


@pytest.mark.parametrize(
    ("dtype", "options", "match"),
    [
        (None, {"moments": "4bit"}, "moments must be"),
        (None, {"moments": torch.float16}, "moments must be"),
        (BF16, {"moments": "8bit"}, "stochastic_rounding=True"),
        (torch.float64, {"moments": BF16}, "not in torch.float64"),
        (BF16, {"moments": torch.float32}, "moments=torch.float32 are for parameters of that dtype"),
        (BF16, {"moments": "float32", "stochastic_rounding": True}, "are for parameters of that dtype"),
    ],
)
def test_what_cannot_be_is_refused(dtype: Any, options: dict[str, Any], match: str, tmp_path: Path) -> None:
    managed = manage(nn.Linear(64, 64).to(dtype or torch.float32), "host", tmp_path, chunk_bytes=2 * CHUNK)
    with pytest.raises(ValueError, match=match):
        hetmem.AdamW(managed.parameters(), **options)


def test_a_checkpoint_of_other_moments_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    managed = manage(nn.Linear(64, 64), "host", tmp_path)
    plain = nn.Linear(64, 64)
    torch_optimizer = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(2, 64)).sum().backward()
    torch_optimizer.step()
    optimizer = hetmem.AdamW(managed.parameters(), moments="8bit")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(hetmem.errors.ManageError, match="without scales"):
        optimizer.load_state_dict(torch_optimizer.state_dict())
    assert optimizer.state_dict() == before
