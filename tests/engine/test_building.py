"""A class that `hetmem.managed` decorates is built in the memory of its tiers, and has the bits of the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import BudgetError


class Odd(nn.Module):
    """Registers parameters in another order than it has them; of two dtypes, some frozen, tied, replaced, written late;
    of sizes whose places in a layout overlap those of others in many ways."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        last = nn.Linear(300, 200)
        self.scale = nn.Parameter(torch.randn(5))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(n, 100), nn.LayerNorm(100)) for n in widths)
        self.narrow = nn.Linear(64, 200, dtype=torch.bfloat16)
        self.frozen = nn.Embedding(90, 100).requires_grad_(False)
        self.last = last
        self.layers[0][0].weight = nn.Parameter(torch.randn(100, widths[0]).t().contiguous().t())
        self.tied = nn.Linear(100, 90, bias=False)
        self.tied.weight = self.frozen.weight
        self.register_buffer("steps", torch.arange(7.0))
        self.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.scale.sum() + self.steps.sum()
        for layer in self.layers:
            out = out + layer(x[:, : layer[0].in_features]).sum()
        tied = self.tied(self.frozen(x[:, 0].abs().long())).sum()
        return out + tied + self.narrow(x[:, :64].bfloat16()).float().sum() + self.last(x[:, :300]).sum()


WIDTHS = (300, 7, 1000, 40, 13, 500, 2, 800, 90, 1) * 2
PARAMETERS_BYTES = sum(p.numel() * p.itemsize for p in Odd(WIDTHS).parameters())


@pytest.mark.parametrize(
    ("device", "host", "nvme", "mixed_precision"),
    [
        ("4MiB", "24MiB", "64KiB", None),  # NVMe had to hold the whole model once more
        ("4MiB", "2MiB", "24MiB", None),
        ("4MiB", "2MiB", "24MiB", torch.bfloat16),
        ("64MiB", "1MiB", "1MiB", None),  # homes are on the device
    ],
)
def test_it_has_the_bits_of_the_plain_class(
    device: str, host: str, nvme: str, mixed_precision: torch.dtype | None, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    plain = Odd(WIDTHS)
    after = torch.get_rng_state()
    budget = hetmem.Budget(device=device, host=host, nvme=nvme, nvme_dir=tmp_path)
    managed_class = hetmem.managed(budget, device="sim", mixed_precision=mixed_precision, chunk_bytes="64KiB")(
        type("Odd", (Odd,), {})
    )
    torch.manual_seed(3)
    managed = managed_class(WIDTHS)
    assert torch.equal(torch.get_rng_state(), after)
    expected = plain.state_dict()
    found = managed.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
    assert managed.tied.weight is managed.frozen.weight
    if mixed_precision is None:
        x = torch.randn(2, 1000)
        assert torch.equal(managed(x), plain(x))
        optimizer = hetmem.AdamW(managed.parameters())
        managed(x).backward()
        optimizer.step()
    hetmem.release(managed)


def test_a_weight_is_initialised_where_it_lies_then(tmp_path: Path) -> None:
    """Written beside and copied, each byte had two first touches, and building took 1.67 of the plain class. What was
    written before the registration, at the ends of a weight too, is kept."""
    addresses: list[tuple[int, int]] = []
    places = [slice(0, 1), slice(-1, None), slice(90_000, 90_001), slice(0, 0)]

    def written_at(place: slice) -> torch.Tensor:
        tensor = torch.empty(1 << 18)
        tensor[place] = 3.0
        return tensor

    class Layer(nn.Module):
        def __init__(self, written: slice) -> None:
            super().__init__()
            self.weight = nn.Parameter(written_at(written))
            self.other = nn.Parameter(torch.empty(1 << 18))
            before = self.other.data_ptr()
            nn.init.normal_(self.other)
            self.inner = nn.Linear(2, 2)
            addresses.append((before, self.other.data_ptr()))

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(written) for written in places)

    torch.manual_seed(5)
    expected = Layers().state_dict()
    for host, nvme in (("16MiB", "1MiB"), ("4MiB", "16MiB")):
        addresses.clear()
        budget = hetmem.Budget(device="2MiB", host=host, nvme=nvme, nvme_dir=tmp_path)
        torch.manual_seed(5)
        managed = hetmem.managed(budget, device="sim")(type("Layers", (Layers,), {}))()
        assert len(addresses) == 4
        assert all(before == after for before, after in addresses)
        found = managed.state_dict()
        for name, tensor in expected.items():
            if name.endswith(".weight") and tensor.dim() == 1:  # the rest of it has no value yet
                place = places[int(name.split(".")[1])]
                assert found[name][place].eq(3.0).all(), name
            else:
                assert torch.equal(found[name], tensor), name
        hetmem.release(managed)


def test_what_was_taken_of_a_weight_while_it_was_built_keeps_its_values(tmp_path: Path) -> None:
    """Homes are made of the memory that the module was built in, over what is no parameter any more."""
    kept: list[torch.Tensor] = []

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))
            kept.extend(layer.weight.data[3:] for layer in self.layers)  # type: ignore[union-attr, index]
            kept.append(self.layers[1].weight)  # type: ignore[arg-type]
            self.layers[1] = nn.Linear(64, 64)

    torch.manual_seed(5)
    Keeping()
    expected = [tensor.detach().clone() for tensor in kept]
    kept.clear()
    torch.manual_seed(5)
    budget = hetmem.Budget(device="1MiB", host="320KiB", nvme="2MiB", nvme_dir=tmp_path)
    model = hetmem.managed(budget, device="sim", chunk_bytes="16KiB")(Keeping)()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for found, tensor in zip(kept, expected, strict=True):
        assert torch.equal(found, tensor)
    hetmem.release(model)


def test_a_constructor_that_fails_leaves_no_file_and_no_hook(tmp_path: Path) -> None:
    class Failing(nn.Module):
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))
            if fails:
                raise RuntimeError("as it is written")

    budget = hetmem.Budget(device="1MiB", host="320KiB", nvme="2MiB", nvme_dir=tmp_path)
    managed = hetmem.managed(budget, device="sim", chunk_bytes="16KiB")(Failing)
    with pytest.raises(RuntimeError, match="as it is written"):
        managed(fails=True)
    assert nn.Linear(2, 2).weight.untyped_storage().resizable()  # as torch has made it
    hetmem.release(managed(fails=False))


def test_what_no_tier_has_room_for_is_refused_while_it_is_built() -> None:
    built = 0

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            nonlocal built
            for index in range(100):
                self.register_module(str(index), nn.Linear(256, 256))
                built += 1

    with pytest.raises(BudgetError, match=r"raise Budget\(host"):
        hetmem.managed(hetmem.Budget(device="2MiB", host="2MiB"), device="sim")(Large)()
    assert built < 20
