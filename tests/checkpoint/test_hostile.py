"""Checkpoints that anybody may have made: each is loaded whole, or refused with an error of hetmem, and then neither
model nor optimizer has changed."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.checkpoint import layout
from hetmem.errors import CheckpointError, HetmemError
from tests.checkpoint.test_all_or_nothing import equal
from tests.engine.harness import budget, manage
from tests.test_hostile_files import ODD, add, drop, mutated, places

TEXTS = ("tied", "crc32", "objects", "extra", "optimizer")


class Small(nn.Module):
    """Tied weights, a buffer, state of its own making, a parameter without a state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.rand(3), requires_grad=False)
        self.b.weight = self.a.weight
        self.norm, self.made = nn.BatchNorm1d(4), {"scale": 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.a(x))).square().sum()

    def get_extra_state(self) -> Any:
        return self.made

    def set_extra_state(self, state: Any) -> None:
        self.made = state


class Trained:
    """A model and its optimizer, with states."""

    def __init__(self, kind: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.kind, self.model = kind, Small()
        if kind == "plain":
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        else:
            self.model = manage(self.model, budget("host", folder), folder, sanitize=False)
            more: dict[str, Any] = {"moments": torch.bfloat16, "stochastic_rounding": True} if kind == "small" else {}
            self.optimizer = hetmem.AdamW(self.model.parameters(), lr=1e-2, loss_scale=4.0, **more)
        self.step()
        self.options = [{**group} for group in self.optimizer.param_groups]

    def step(self) -> None:
        scale = getattr(self.optimizer, "scale", lambda loss: loss)
        scale(self.model(torch.ones(2, 4))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> Any:
        states = [self.optimizer.state[p] for p in self.model.parameters() if p in self.optimizer.state]
        options = [{**group, "params": None} for group in self.optimizer.param_groups]
        beside = self.optimizer.beside_states() if self.kind != "plain" else None
        return kept([self.model.state_dict(), states, options, beside])

    def restore(self, whole: Path) -> None:
        """Undo what a file has changed that was loaded."""
        self.model.made = {"scale": 3}
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.clear()
            group.update(options)
        hetmem.load(whole, self.model, self.optimizer)

    def save(self, path: Path) -> None:
        extra = {"step": 1, "rng": torch.arange(3), "lists": [(1.5, float("inf")), {2}, b"x", 1j, torch.float32]}
        hetmem.save(path, self.model, self.optimizer, extra)


def kept(value: Any) -> Any:
    """Copies of tensors, and the text of all else, as NaN is not equal to itself."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: kept(part) for name, part in value.items()}
    return list(map(kept, value)) if isinstance(value, (list, tuple)) else repr(value)


@pytest.fixture(scope="module", params=["plain", "host", "small"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(request.param, tmp_path_factory.mktemp("trained"))


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a checkpoint, with what is text in it as values, and the data."""
    start = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:start])
    for name in TEXTS:
        table["__metadata__"][f"hetmem.{name}"] = json.loads(table["__metadata__"][f"hetmem.{name}"])
    return table, data[start:]


def sealed(table: Any, rest: bytes) -> bytes:
    """A file with that header, and the right checksum of it."""
    table = {**table} if isinstance(table, dict) else table
    metadata = table.get("__metadata__") if isinstance(table, dict) else None
    if isinstance(metadata, dict):
        texts = {f"hetmem.{name}" for name in TEXTS}
        metadata = {name: json.dumps(value) if name in texts else value for name, value in metadata.items()}
        if "hetmem.header_crc32" in metadata and isinstance(metadata["hetmem.header_crc32"], str):
            metadata["hetmem.header_crc32"] = "0" * 8
        table["__metadata__"] = metadata
    text = json.dumps(table, separators=(",", ":")).encode()
    check = f"{zlib.crc32(text):08x}"
    text = layout.with_check(text, "0" * 8, check)
    return len(text).to_bytes(8, "little") + text + rest


def reseal(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    table, rest = opened(data)
    change(table)
    return sealed(table, rest)


def refused_or_whole(path: Path, trained: Trained, load: Callable[[], object]) -> str | None:
    """The message of the refusal, after which nothing has changed; None if it was loaded."""
    before, said = trained.snapshot(), ""
    try:
        load()
    except HetmemError as error:
        said = str(error)
    if not said:
        return None
    assert equal(before, trained.snapshot()), f"it was refused, and has changed something: {said}"
    assert "partly loaded" not in said
    assert re.search("checkpoint|the weights are|the state of", said) or str(path) in said
    return said


def ways(path: Path, trained: Trained) -> list[Callable[[], object]]:
    return [
        lambda: hetmem.load(path, trained.model, trained.optimizer),
        lambda: hetmem.load(path, trained.model),
        lambda: hetmem.load_weights(path, trained.model),
        lambda: hetmem.load_weights(path, trained.model, strict=False, rounding=True),
    ]


def mutations(table: dict[str, Any], rest: bytes, seed: int) -> Iterator[bytes]:
    """Files in which one value, or two, are odd, gone, there twice, or that of another place; all else is right."""
    chance = random.Random(seed)
    spots = list(places(table))
    values = [*ODD, drop, add, float("nan"), float("inf"), "a.weight", {"tensor": "a.bias"}, {"dict": []}, [[[]]]]
    while True:
        changed = table
        for _ in range(chance.choice((1, 1, 2))):
            place = chance.choice(spots)
            try:
                if chance.random() < 0.3:  # another value of the file
                    odd = table
                    for key in chance.choice(spots):
                        odd = odd[key]
                else:
                    odd = chance.choice(values)
                changed = mutated(changed, place, odd)
            except (LookupError, TypeError):
                continue  # the first change has removed that place
        yield sealed(changed, rest)


def attack(trained: Trained, path: Path, files: Iterator[bytes], whole: bytes, count: int) -> int:
    """The number of `count` files that were refused in some way."""
    refused = 0
    for number, data in zip(range(count), files, strict=False):
        path.write_bytes(data)
        loads = ways(path, trained)
        found = [refused_or_whole(path, trained, load) for load in (loads if number % 8 == 0 else loads[:1])]
        if not all(found):
            path.write_bytes(whole)
            trained.restore(path)
        refused += any(found)
    return refused


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_metadata_that_lie_are_refused_and_nothing_has_changed(seed: int, trained: Trained, tmp_path: Path) -> None:
    trained.save(tmp_path / "c")
    whole = (tmp_path / "c").read_bytes()
    count = 2000 if seed else 15
    refused = attack(trained, tmp_path / "c", mutations(*opened(whole), seed), whole, count)
    assert count / 2 < refused


# ---- one by one ------------------------------------------------------------------------------------------------------


def at(*place: str) -> Callable[[Callable[[Any], object]], Callable[[dict[str, Any]], object]]:
    def of(change: Callable[[Any], object]) -> Callable[[dict[str, Any]], object]:
        def changed(table: dict[str, Any]) -> object:
            inner: Any = table
            for key in place:
                inner = inner[key]
            return change(inner)

        return changed

    return of


def metadata(name: str) -> Callable[[Callable[[Any], object]], Callable[[dict[str, Any]], object]]:
    return at("__metadata__", f"hetmem.{name}")


def option(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(optimizer: Any) -> None:
        pairs = optimizer["groups"][0]["options"]["dict"]
        next(pair for pair in pairs if pair[0] == name)[1] = value

    return metadata("optimizer")(change)


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an object that is a parameter's": (
        metadata("objects")(lambda objects: objects.update({"a.bias": 3})),
        r"\['hetmem.objects'\]\['a.bias'\] is the name of something else in the file, too",
    ),
    "an object that is a tied parameter's": (
        lambda table: (
            metadata("tied")(lambda tied: tied.clear())(table),
            metadata("objects")(lambda objects: objects.update({"b.weight": 3}))(table),
        ),
        r"b\.weight is a tensor in the model and none in the checkpoint",
    ),
    "tied to nothing": (
        metadata("tied")(lambda tied: tied.update({"b.weight": "c"})),
        r"\['hetmem.tied'\]\['b.weight'\]: expected a tensor of the model in the file, got 'c'",
    ),
    "tied, a list": (
        lambda table: table["__metadata__"].update({"hetmem.tied": []}),
        r"\['hetmem.tied'\]: expected an object, got \[\]",
    ),
    "offsets": (
        at("a.bias")(lambda entry: entry.update(data_offsets=list(map(float, entry["data_offsets"])))),
        r"\['a.bias'\]\.data_offsets\[0\]: expected a whole number, 0 or more, got [0-9.]+",
    ),
    "true as a size": (
        at("frozen")(lambda entry: entry.update(shape=[3, True])),
        r"frozen\.shape\[1\]: expected a whole number, 0 or more, got True",
    ),
    "NaN as learning rate": (
        option("lr", float("nan")),
        "lr of parameter group 0 in the checkpoint: expected a finite number, got nan",
    ),
    "an infinite one": (option("lr", float("inf")), "lr of parameter group 0 .*: expected a finite number, got inf"),
    "text as learning rate": (option("lr", "1"), "lr of parameter group 0 .*: expected a number, got '1'"),
    "one beta": (option("betas", {"tuple": [0.9]}), r"betas of parameter group 0 .*: expected 2 values, got \(0.9,\)"),
    "NaN in betas": (
        option("betas", {"tuple": [0.9, float("nan")]}),
        "betas of parameter group 0 .*: expected a finite number, got nan",
    ),
    "an unknown parameter": (
        metadata("optimizer")(lambda optimizer: optimizer["state"].update({"c": {"dict": []}})),
        "the checkpoint has states of c, and the optimizer no such parameter",
    ),
    "no states": (
        metadata("optimizer")(lambda optimizer: optimizer.pop("state")),
        r"\['hetmem.optimizer'\]\.state is missing",
    ),
    "an unheard of key": (
        metadata("optimizer")(lambda optimizer: optimizer.update(more=1)),
        r"\['hetmem.optimizer'\] has no key 'more'",
    ),
    "a state that is no dict": (
        metadata("optimizer")(lambda optimizer: optimizer["state"].update({"a.bias": 3})),
        "the state of a.bias in the checkpoint: expected a dict, got 3",
    ),
    "a name with a NUL": (
        lambda table: table.update({"a\0": table.pop("a.bias")}),
        r"the name 'a\\x00' has a NUL or a lone surrogate",
    ),
    "a lone surrogate": (
        lambda table: table.update({"a\ud800": table.pop("a.bias")}),
        r"the name 'a\\ud800' has a NUL or a lone surrogate",
    ),
}


@pytest.mark.parametrize(("change", "match"), LIES.values(), ids=LIES)
def test_a_lie_is_refused_by_its_place(
    change: Callable[[dict[str, Any]], object], match: str, trained: Trained, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    trained.save(path)
    path.write_bytes(reseal(path.read_bytes(), change))
    said = refused_or_whole(path, trained, lambda: hetmem.load(path, trained.model, trained.optimizer))
    assert said is not None
    assert re.search(match, said), said


def test_a_clone_in_the_state_dict_of_another_shape_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """`load_state_dict` found out, when the rest had been loaded."""
    saved, module = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width)) for width in (3, 2))
    for each in (saved, module):
        each[1].register_state_dict_post_hook(lambda _, state, *__: state.update({"1.bias": state["1.bias"].clone()}))
    hetmem.save(tmp_path / "c", saved)
    before = kept(module.state_dict())
    module[1].weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match=r"1\.bias is \(3,\) in the checkpoint and \(2,\) in the model"):
        hetmem.load(tmp_path / "c", module)
    assert equal(before["0.weight"], module[0].weight.detach())


def test_states_that_an_optimizer_of_torch_refuses_leave_it_as_it_was(tmp_path: Path) -> None:
    trained = Trained("plain", tmp_path)
    path = tmp_path / "c"
    trained.save(path)

    def without_steps(optimizer: Any) -> None:
        for state in optimizer["state"].values():
            state["dict"] = [pair for pair in state["dict"] if pair[0] != "step"]

    path.write_bytes(reseal(path.read_bytes(), metadata("optimizer")(without_steps)))
    said = refused_or_whole(path, trained, lambda: hetmem.load(path, trained.model, trained.optimizer))
    assert "are not those of a AdamW, whose load_state_dict raised KeyError('step')" in str(said)
