"""A frozen embedding whose table is not on the device: the rows of a batch cross the link, and not the table."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from tests.engine import harness

ROWS, WIDTH, TOKENS = 512, 64, 24
CHUNK = 16 * 1024


class Reader(nn.Module):
    """An embedding, and layers behind it that are trained; with `tied`, a head with the embedding's weight."""

    def __init__(self, *, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, **options).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, ROWS, bias=False).requires_grad_(False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointed = False

    def begin(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed(tokens)
        return self.layers[0](embedded).relu()  # type: ignore[no-any-return]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.begin, tokens, use_reentrant=False) if self.checkpointed else self.begin(tokens)
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Own(nn.Embedding):
    """A class of the program's, which may do anything with its table."""


def managed(plain: nn.Module, directory: Path, placement: str = "third", **options: Any) -> Any:
    room: dict[str, Any] = {"device": "8MiB", "host": "8MiB"}
    if placement not in ("all", "codes"):
        room |= {"device_chunks": "160KiB"}
    if placement == "nvme":
        room |= {"host": "600KiB", "nvme": "8MiB", "nvme_dir": directory}
    return harness.manage(copy.deepcopy(plain), hetmem.Budget(**room), directory, chunk_bytes=CHUNK, **options)


def crossed(model: nn.Module) -> int:
    found: int = hetmem.report(model).to_dict()["links"]["host_to_device"]["bytes"]
    return found


@pytest.mark.each
@pytest.mark.parametrize("placement", ["all", "third", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_rows_train_with_the_bits_of_torch(
    placement: str, dtype: torch.dtype, checkpointed: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = Reader(padding_idx=0).to(dtype)
    plain.checkpointed = checkpointed
    model = managed(plain, tmp_path, placement)
    optimizers = (
        torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], fused=True),
        hetmem.AdamW([p for p in model.parameters() if p.requires_grad]),
    )
    for step in range(3):
        tokens = torch.randint(0, ROWS, (2, TOKENS // 2), generator=torch.Generator().manual_seed(step))
        losses = plain(tokens), model(tokens)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        harness.assert_same(*losses, "the loss")
    harness.assert_same_weights(plain, model)


@pytest.mark.each
@pytest.mark.parametrize("placement", ["all", "third", "nvme"])
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("mixed", [None, torch.bfloat16])
def test_an_evaluation_reads_rows_of_a_trained_table_as_updated(
    placement: str, overlap: Any, mixed: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = Reader().requires_grad_(True)
    model = managed(plain, tmp_path, placement, mixed_precision=mixed)
    optimizer = hetmem.AdamW(model.parameters(), lr=0.1, overlap=overlap)
    for step in range(3):
        tokens = torch.randint(0, ROWS, (2, TOKENS // 2), generator=torch.Generator().manual_seed(step))
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found = model.embed(tokens)
            if step == 1:
                model.embed.weight[tokens[0, 0]].zero_()
            loss = model(tokens)
        twin = copy.deepcopy(model).to(mixed)
        harness.assert_same(F.embedding(tokens, twin.embed.weight), model.embed(tokens), "rows")
        assert step == 1 or torch.equal(found, model.embed(tokens))
        with torch.no_grad():
            harness.assert_same(twin(tokens), loss, "the loss")


@pytest.mark.each
@pytest.mark.parametrize("frozen", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("placement", ["third", "nvme", "codes"])
def test_rows_of_a_quantised_table_are_decoded_alone(frozen: Any, placement: str, tmp_path: Path) -> None:
    """Those of fp8 share scales: its table is copied."""
    torch.manual_seed(0)
    plain: Any = Reader().requires_grad_(False).bfloat16()
    model = managed(plain, tmp_path, placement, frozen={"embed.*": frozen})
    tokens = torch.randint(0, ROWS, (2, TOKENS // 2))
    decoded = F.embedding(tokens, model.embed.weight.detach().clone())
    before = crossed(model)
    with torch.no_grad():
        harness.assert_same(decoded, model.embed(tokens), "rows")
    row = {"nf4": 36, "int8": 68, "fp8": 0}[frozen]
    table = testing.of(model).chunks()[testing.of(model).chunk_of("embed.weight")].home_bytes["param"]
    assert crossed(model) - before == (0 if placement == "codes" else TOKENS * row or table)


def forwards(model: nn.Module, tokens: torch.Tensor) -> int:
    """The bytes that a forward brings to the device once its trace is known."""
    counts = []
    with torch.no_grad():
        for _ in range(4):
            model(tokens)
            counts.append(crossed(model))
    return [after - before for before, after in pairwise(counts)][-1]


def test_the_link_carries_rows_in_place_of_the_table(tmp_path: Path) -> None:
    tokens = torch.arange(TOKENS).view(2, -1)
    plain: Any = Reader().requires_grad_(False)
    other = copy.deepcopy(plain)
    other.embed.__class__ = Own
    rows, whole = (forwards(managed(model, tmp_path), tokens) for model in (plain, other))
    assert whole - rows == 4 * (ROWS - TOKENS) * WIDTH


@pytest.mark.parametrize(
    ("why", "model", "tokens"),
    [
        ("most of its rows are read", Reader(), torch.arange(ROWS).view(2, -1)),
        ("its norm is changed", Reader(max_norm=1.0), torch.arange(TOKENS).view(2, -1)),
        ("it is the head's too", Reader(tied=True), torch.arange(TOKENS).view(2, -1)),
    ],
)
def test_a_table_is_copied_where(why: str, model: Any, tokens: torch.Tensor, tmp_path: Path) -> None:
    other = managed(model.requires_grad_(False), tmp_path)
    with torch.no_grad():
        harness.assert_same(model(tokens), other(tokens), why)
    tables = 1 if why.startswith("it is") else 2
    assert crossed(other) >= 4 * tables * ROWS * WIDTH
    moved = testing.of(other).transfers()
    assert all(block >= 0 for link, block, _ in moved if link == "host_to_device"), "rows are of no block"
    for part in (model, other):
        assert part.embed.weight.isfinite().all()


class Asks(nn.Module):
    """A table that a function looks up, with `options` that change as the program likes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.options: dict[str, Any] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens) + F.embedding(tokens, self.table.weight, **self.options)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_call_may_ask_for_another_norm(frozen: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Asks().requires_grad_(not frozen)
    model = managed(plain, tmp_path)
    tokens = torch.arange(TOKENS).view(2, -1)
    for options in ({}, {"max_norm": 6.0}, {}):
        for each in (plain, model):
            each.options = options
        with torch.no_grad():
            harness.assert_same(plain(tokens), model(tokens), str(options))
    for each in (plain, model):
        each.table.max_norm = 4.0
    with torch.no_grad():
        harness.assert_same(plain(tokens), model(tokens), "max_norm set later")
    harness.assert_same_weights(plain, model)


def test_what_torch_refuses_is_refused(tmp_path: Path) -> None:
    model = managed(Asks(), tmp_path)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Expected tensor for argument #1 'indices'"):
        model.table(torch.zeros(3, dtype=torch.int16))
    model.options = {"padding_idx": ROWS}
    with torch.no_grad(), pytest.raises(AssertionError, match="Padding_idx must be within num_embeddings"):
        model(torch.arange(TOKENS))


def test_an_evaluation_in_inference_mode_moves_what_one_without_gradients_moves(tmp_path: Path) -> None:
    moved = []
    for mode in (torch.no_grad, torch.inference_mode):
        model = managed(Reader().requires_grad_(True), tmp_path)
        tokens = torch.arange(TOKENS).view(2, -1)
        for _ in range(3):
            model(tokens).backward()
            model.zero_grad()
            before = crossed(model)
            with mode():
                model(tokens)
        moved.append(crossed(model) - before)
    assert moved[0] == moved[1]


def test_a_write_to_the_table_is_read_and_a_row_that_it_lacks_is_an_error(tmp_path: Path) -> None:
    plain = Reader()
    model = managed(plain, tmp_path)
    tokens = torch.arange(TOKENS).view(2, -1)
    model(tokens)
    for module in (plain, model):
        with torch.no_grad():
            module.embed.weight[3].mul_(2)
        module.embed.weight.data[5].zero_()
    harness.assert_same(plain(tokens), model(tokens), "the loss")
    with torch.inference_mode():
        harness.assert_same(plain(tokens), model(tokens), "the loss without a graph")
    with pytest.raises(IndexError, match="out of range"):
        model(tokens + ROWS)
    for module in (plain, model):
        module.embed.requires_grad_(True)
        module(tokens).backward()
    harness.assert_same_grads(plain, model)
