"""Frozen weights as codes: adapters train with the bits of plain torch over the decoded values; a quantised weight can
be read as any other, and nothing can write to it."""

from __future__ import annotations

import copy
import gc
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from hetmem.errors import ManageError
from tests.engine import harness
from tests.pairs import case

FORMATS = ("nf4", "nf4-nested", "mxfp4", "fp8", "int8")
PLACEMENTS, OVERLAPS = ("all", "third", "nvme", "codes"), ("off", "backward", "forward")
WIDTH, TOKENS = 64, 80
CHUNK = 32 * 1024
PER_ELEMENT = {"nf4": 0.5625, "nf4-nested": 0.5159, "mxfp4": 0.53125, "fp8": 1.0002, "int8": 1 + 4 / WIDTH}


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 4."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, inputs) * 0.02)
        self.up = nn.Parameter(torch.randn(outputs, 4) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend, self.out = Adapted(WIDTH, 3 * WIDTH), Adapted(WIDTH, WIDTH)
        self.wide, self.narrow = Adapted(WIDTH, 4 * WIDTH), Adapted(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attend(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value))
        return x + self.narrow(F.gelu(self.wide(x)))


class GPT(nn.Module):
    """Its embedding and its head are frozen, too, and stay in 16 bits."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False).requires_grad_(False)
        self.checkpointed = checkpointed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def budget(placement: str, directory: Path) -> hetmem.Budget:
    """The device has room for all copies, for a third of them, for codes and half of the copies, or most homes are on
    NVMe."""
    chunks = {"all": "384KiB", "codes": "512KiB"}.get(placement, "288KiB")
    room: dict[str, Any] = {"device": "8MiB", "device_chunks": chunks, "host": "64MiB"}
    if placement == "nvme":
        room |= {"host": "256KiB", "nvme": "64MiB", "nvme_dir": directory}
    return hetmem.Budget(**room)


def managed(
    model: nn.Module, frozen: Any, directory: Path, placement: str = "third", dtype: torch.dtype | None = None
) -> nn.Module:
    return harness.manage(
        model, budget(placement, directory), directory, chunk_bytes=CHUNK, frozen=frozen, mixed_precision=dtype
    )


def small(frozen: Any = "nf4", directory: Path = Path()) -> Any:
    """One quantised weight, and one of another dtype beside it that is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)).bfloat16()
    model[0].requires_grad_(False)
    return managed(model, frozen, directory)


def decoded_twin(plain: nn.Module, model: nn.Module) -> list[str]:
    """Give `plain` the decoded values of `model`; return the names of the weights that these are of."""
    quantised = []
    with torch.no_grad():
        for (name, mine), its in zip(plain.named_parameters(), model.parameters(), strict=True):
            if not torch.equal(mine.to(its.dtype), its):
                quantised.append(name)
                mine.copy_(its)
    return quantised


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.each
@pytest.mark.parametrize("frozen", FORMATS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_train_as_over_the_decoded_values(
    frozen: str, placement: str, overlap: Any, checkpointed: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = GPT(checkpointed=checkpointed).to(
        {"mxfp4": torch.float16, "fp8": torch.float32}.get(frozen, torch.bfloat16)
    )
    model = managed(copy.deepcopy(plain), frozen, tmp_path, placement)
    assert len(decoded_twin(plain, model)) == 12
    optimizers = (
        torch.optim.AdamW(trainable(plain), lr=1e-2, fused=True),
        hetmem.AdamW(trainable(model), lr=1e-2, overlap=overlap),
    )
    for _ in range(2):
        tokens = torch.randint(0, TOKENS, (2, 8))
        losses = [module(tokens) for module in (plain, model)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        harness.assert_same(*losses, "the loss")
    assert harness.nvme_bytes(model) > 0 or placement != "nvme"
    assert (testing.of(model).homes("param") == {"device"}) is (placement == "codes" and frozen != "fp8")
    harness.assert_same_weights(plain, model)
    hetmem.release(model)
    harness.assert_same_weights(plain, model, "released")
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_masters_of_float32_are_quantised_beside_adapters_in_mixed_precision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = managed(GPT(), "nf4", tmp_path, dtype=torch.bfloat16)
    weight = model.blocks[0].out.base.weight
    assert weight.dtype is torch.bfloat16
    assert model.blocks[0].out.up.dtype is torch.float32
    tokens = torch.randint(0, TOKENS, (2, 8))
    plain = GPT()
    hetmem_decoded = {name: p.detach().float() for name, p in model.named_parameters()}
    plain.load_state_dict({**plain.state_dict(), **hetmem_decoded})
    twin = harness.manage(plain, "host", tmp_path, mixed_precision=torch.bfloat16)
    harness.assert_same(twin(tokens), model(tokens), "the loss")


@pytest.mark.each
@pytest.mark.parametrize("frozen", FORMATS)
@pytest.mark.parametrize("placement", ["third", "nvme"])
def test_homes_and_links_carry_codes_alone(frozen: str, placement: str, tmp_path: Path) -> None:
    plain = nn.Sequential(*(nn.Linear(8 * WIDTH, WIDTH, bias=False) for _ in range(8)), nn.Linear(4, 4)).bfloat16()
    plain[:-1].requires_grad_(False)
    model = managed(plain, {"*": frozen, "8.*": None} if frozen == "nf4" else frozen, tmp_path, placement)
    columns = 8 * WIDTH
    most = 8 * columns * WIDTH * {**PER_ELEMENT, "int8": 1 + 4 / columns}[frozen]
    chunks = [chunk for chunk in testing.of(model).chunks() if "8.weight" not in chunk.parameters]
    held = sum(chunk.home_bytes["param"] for chunk in chunks)
    assert most - 4096 < held <= most + 4096 * len(chunks)
    x = torch.ones(1, columns, dtype=torch.bfloat16)
    before = hetmem.report(model).to_dict()["links"]["host_to_device"]["bytes"]
    with torch.no_grad():
        for layer in model[:-1]:
            layer(x)
    assert hetmem.report(model).to_dict()["links"]["host_to_device"]["bytes"] - before == held


READS: dict[str, Callable[[Any], Any]] = {
    "float": lambda p: p.float(),
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach(),
    "sum": lambda p: p.sum(),
    "a list of weights": lambda p: torch._foreach_norm([p, p])[1],
    "a product": lambda p: torch.nn.functional.linear(torch.ones(2, WIDTH, dtype=p.dtype), p),
    "an element": lambda p: p[3, 5],
    "numpy": lambda p: torch.from_numpy(p.float().numpy()),
    "a copy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: _pickled(p),
    "an average": lambda p: torch.zeros(WIDTH, WIDTH).lerp_(p.float(), 0.25),
    "out": lambda p: torch.add(p, 1, out=torch.empty(WIDTH, WIDTH, dtype=p.dtype)),
    "text": lambda p: torch.tensor([ord(letter) for letter in repr(p)]),
    "strides": lambda p: torch.tensor([*p.stride(), p.is_contiguous(), *p.size(), p.dim()]),
    "dtype": lambda p: torch.tensor([p.dtype is torch.bfloat16, p.is_cpu, p.is_leaf]),
}


def _pickled(parameter: Any) -> Any:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("read", READS)
def test_a_function_gets_the_decoded_values(read: str, tmp_path: Path) -> None:
    model = small(directory=tmp_path)
    weight = model[0].weight
    plain = nn.Parameter(testing.of(model).home(weight), requires_grad=False)
    assert plain.isfinite().all()
    found, expected = READS[read](weight), READS[read](plain)
    harness.assert_same(expected, found, read)
    assert type(found) is type(expected)
    assert isinstance(weight, nn.Parameter)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.mul_(2),
    "an element": lambda p: p.__setitem__((0, 0), 1.0),
    "iadd": lambda p: p.__iadd__(1),
    "out": lambda p: torch.add(p, 1, out=p),
    "a list of weights": lambda p: torch._foreach_mul_([p], 2.0),
    "data": lambda p: setattr(p, "data", torch.zeros(WIDTH, WIDTH, dtype=p.dtype)),
    "training": lambda p: p.requires_grad_(True),
    "training, by name": lambda p: setattr(p, "requires_grad", True),
    "set_": lambda p: p.set_(torch.zeros(WIDTH, WIDTH, dtype=p.dtype)),
    "an exchange": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(WIDTH, WIDTH))),
    "sharing": lambda p: p.share_memory_(),
    "an address": lambda p: p.data_ptr(),
    "a storage": lambda p: p.untyped_storage(),
    "DLPack": lambda p: torch.from_dlpack(p),
}


@pytest.mark.parametrize("write", WRITES)
def test_nothing_writes_to_a_quantised_weight(write: str, tmp_path: Path) -> None:
    model = small(directory=tmp_path)
    x, weight = torch.randn(2, WIDTH, dtype=torch.bfloat16), model[0].weight
    before, values = model(x), weight.float()
    with torch.no_grad(), pytest.raises((ManageError, RuntimeError), match=r"0\.weight .*nf4|release"):
        WRITES[write](weight)
    assert not weight.requires_grad
    harness.assert_same(values, weight.float(), "the weight")
    harness.assert_same(before, model(x), "the output")


def test_a_state_dict_cannot_be_loaded_into_a_quantised_weight(tmp_path: Path) -> None:
    model = small(directory=tmp_path)
    values = model[0].weight.float()
    with pytest.raises(RuntimeError, match="kept as codes of nf4"):
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    harness.assert_same(values, model[0].weight.float(), "the weight")


class Writing(nn.Module):
    """Writes to its weight in its forward, as told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(WIDTH))
        self.write: Callable[[torch.Tensor], object] = lambda weight: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.weight)
        return F.linear(x, self.weight) * self.trained


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: setattr(weight, "data", torch.zeros(WIDTH, WIDTH)),
        lambda weight: weight.requires_grad_(True),
    ],
    ids=["in place", "through data", "data", "training"],
)
def test_a_write_within_a_forward_is_refused_and_leaves_no_trace(write: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = managed(Writing(), "nf4", tmp_path)
    x = torch.randn(2, WIDTH)
    expected, model.write = model(x).detach(), write
    with pytest.raises(ManageError, match="kept as codes of nf4"):
        model(x).sum().backward()
    model.write = lambda weight: weight.data.sum() + weight.stride(0)
    for _ in range(2):
        harness.assert_same(expected, model(x), "the output")


class Tied(nn.Module):
    """A head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.kernel = nn.Conv1d(WIDTH, WIDTH, 3)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.little, self.numbers = nn.Linear(WIDTH, WIDTH - 1, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)
        self.double()
        self.kernel.float()
        self.experts.data = self.experts.data.half()
        self.numbers.requires_grad_(True)


def test_what_is_quantised_are_wide_frozen_weights_but_tables(tmp_path: Path) -> None:
    """Convolutions and stacked experts included; a mapping selects others, and the first pattern counts."""
    plain = Tied()
    model = managed(copy.deepcopy(plain), "nf4", tmp_path)
    assert decoded_twin(plain, model) == ["experts", "kernel.weight"]
    plain = Tied().float()
    chosen = {"embed.*": "int8", "ex*": None, "kernel.weight": "fp8", "*": None}
    model = managed(copy.deepcopy(plain), chosen, tmp_path)
    assert decoded_twin(plain, model) == ["embed.weight", "kernel.weight"]


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        ("nf3", "frozen must be one of 'nf4', .* got 'nf3'"),
        (3, "frozen must be one of .* or a mapping .* got 3"),
        ({}, "or a mapping"),
        ({"0.*": "fp4"}, r"frozen\['0\.\*'\] must be one of .* got 'fp4'"),
        ({"0.*": "nf4", "2.*": "nf4"}, r"the pattern '2\.\*' of frozen= selects no weight"),
        ({"1.*": "nf4"}, "selects no weight .* requires_grad=False"),
    ],
)
def test_what_selects_nothing_or_is_no_format_is_refused(frozen: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ManageError, match=message):
        small(frozen, tmp_path)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_no_format_can_hold_is_refused_before_anything_changes(bad: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    model[1].weight.data[-1, -1] = bad
    before = model[0].weight.clone()
    with pytest.raises(ManageError, match=r"1\.weight has an infinity or NaN"):
        managed(model, "nf4", tmp_path)
    harness.assert_same(before, model[0].weight, "the other weight")


def test_a_class_is_managed_as_it_is_built_with_its_frozen_weights_as_codes(tmp_path: Path) -> None:
    class Built(nn.Sequential):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(*(nn.Linear(WIDTH, WIDTH).requires_grad_(n > 3) for n in range(6)))

    room, device = hetmem.Budget(device="64MiB", host="4MiB"), harness.DEVICE()
    model = hetmem.managed(room, device=device, frozen="fp8", chunk_bytes=CHUNK)(type("Managed", (Built,), {}))()
    twin = managed(Built(), "fp8", tmp_path)
    harness.assert_same_weights(twin, model)


def test_a_weight_whose_model_is_gone_says_so(tmp_path: Path) -> None:
    model = small(directory=tmp_path)
    weight = model[0].weight
    del model
    gc.collect()
    with pytest.raises(ManageError, match="its model, which had its codes, is gone"):
        weight.sum()


def test_optimizers_of_torch_skip_codes_and_copies_of_the_model_have_the_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = GPT().bfloat16()
    model = managed(copy.deepcopy(plain), "nf4", tmp_path)
    decoded_twin(plain, model)
    for module in (plain, model):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        for _ in range(2):
            module(torch.arange(16).view(2, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    harness.assert_same_weights(plain, model)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    harness.assert_same_weights(plain, average.module)
    for _ in range(5):  # whatever the addresses of decoded values
        harness.assert_same_weights(plain, copy.deepcopy(model), "of a copy")
    assert type(copy.deepcopy(model).blocks[0].out.base.weight) is nn.Parameter
    with torch.inference_mode():
        harness.assert_same(plain(torch.arange(16).view(2, 8)), model(torch.arange(16).view(2, 8)), "the loss")


PAIRS = [
    (frozen, placement, OVERLAPS[(row + column) % 3])
    for row, frozen in enumerate(FORMATS)
    for column, placement in enumerate(PLACEMENTS)
]
"""Each format in each placement, and each overlap with each of both."""


@pytest.mark.parametrize(("frozen", "placement", "overlap"), [case(*each, nightly=each != PAIRS[6]) for each in PAIRS])
def test_micro_batches_share_each_decoded_copy(frozen: str, placement: str, overlap: Any, tmp_path: Path) -> None:
    """`hetmem.accumulate` over codes has the bits of the loop over their values."""
    torch.manual_seed(0)
    plain = GPT().bfloat16()
    model = managed(copy.deepcopy(plain), frozen, tmp_path, placement)
    decoded_twin(plain, model)
    optimizers = torch.optim.AdamW(trainable(plain), fused=True), hetmem.AdamW(trainable(model), overlap=overlap)
    for _ in range(2):
        batches = [torch.randint(0, TOKENS, (2, 8)) for _ in range(3)]
        losses = [plain(batch) for batch in batches]
        for loss in losses:
            loss.backward()
        made = hetmem.accumulate(model, batches, lambda module, batch: module(batch))
        for loss, its in zip(losses, made, strict=True):
            harness.assert_same(loss.detach(), its, "a loss")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    harness.assert_same_weights(plain, model)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it, but not as an error
@pytest.mark.parametrize(("frozen", "placement", "overlap"), PAIRS)
def test_compiled_blocks_train_over_codes(frozen: str, placement: str, overlap: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = GPT().bfloat16()
    model = managed(copy.deepcopy(plain), frozen, tmp_path, placement)
    decoded_twin(plain, model)
    for block in (*plain.blocks, *model.blocks):
        block.compile(backend="aot_eager")
    optimizers = torch.optim.AdamW(trainable(plain), fused=True), hetmem.AdamW(trainable(model), overlap=overlap)
    for _ in range(3):
        tokens = torch.randint(0, TOKENS, (2, 8))
        losses = plain(tokens), model(tokens)
        harness.assert_same(*losses, "the loss")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    harness.assert_same_weights(plain, model)
