"""Others read what hetmem saves; what hetmem reads runs no code; `extra` comes back as it was."""

from __future__ import annotations

import io
import json
import os
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hetmem
from hetmem.checkpoint import header, layout
from hetmem.checkpoint.contents import Encoder, decode
from hetmem.checkpoint.layout import Stored
from hetmem.errors import CheckpointError
from tests.checkpoint.models import Awkward, start
from tests.engine.harness import PLACEMENTS, assert_same, same_bits
from tests.pairs import examples

# ---- what others read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_safetensors_reads_every_tensor_under_its_name(placement: str, tmp_path: Path) -> None:
    run = start(tmp_path, placement)
    run.steps(0, 2)
    run.save(tmp_path / "c")
    found = safetensors.torch.load_file(tmp_path / "c")
    state = run.module.state_dict()
    for name in state.keys() - {"head.weight"}:
        assert_same(state[name], found[name], name)
    for name, parameter in run.module.named_parameters():
        for what, value in run.optimizer.state.get(parameter, {}).items():
            assert_same(value, found.pop(f"optimizer:{name}:{what}"), f"{what} of {name}")
    assert {name for name in found if name not in state} == {"extra:rng"}
    with safetensors.safe_open(tmp_path / "c", "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert json.loads(metadata["hetmem.tied"]) == {"head.weight": "embedding.weight"}


def test_a_file_of_weights_loads_with_safetensors_own_loader(tmp_path: Path) -> None:
    run = start(tmp_path)
    hetmem.save(tmp_path / "c", run.module)
    other = Awkward()
    assert safetensors.torch.load_model(other, tmp_path / "c") == (set(), [])
    for name, value in run.module.state_dict().items():
        assert_same(value, other.state_dict()[name], name)


def test_a_file_that_safetensors_wrote_is_refused_with_the_way_to_read_it(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    safetensors.torch.save_model(module, str(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=r"hetmem\.save did not write: hetmem\.load_weights"):
        hetmem.load(tmp_path / "c", module)


DTYPES = [dtype for dtype in layout._NAMES if dtype is not torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    module = nn.Module()
    bits = torch.randint(0, 2, (8, 5, dtype.itemsize), dtype=torch.uint8)
    if dtype is not torch.bool:
        bits = torch.randint(0, 256, bits.shape, dtype=torch.uint8)
    module.register_buffer("b", bits.view(dtype).reshape(8, 5).t())
    module.register_buffer("empty", torch.empty(0, 3, dtype=dtype))
    module.register_buffer("one", bits[0, 0].view(dtype)[0])
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    hetmem.save(tmp_path / "c", module)
    for value in module.buffers():
        value.zero_()
    hetmem.load(tmp_path / "c", module)
    found = safetensors.torch.load_file(tmp_path / "c")
    for name, value in module.named_buffers():
        assert_same(expected[name], value, name)
        assert_same(expected[name], found[name], name)


def test_tensors_of_many_blocks_in_any_order_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 64)
    module = nn.Module()
    values = torch.randn(7, 5, 6, 3)
    for number, order in enumerate([(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]):
        module.register_parameter(f"p{number}", nn.Parameter(values.permute(order)))
    module.register_parameter("long", nn.Parameter(torch.randn(1000)))
    module.register_parameter("wide", nn.Parameter(torch.randn(2, 1000)))
    module.register_parameter("one", nn.Parameter(torch.randn(())))
    hetmem.save(tmp_path / "c", module)
    found = safetensors.torch.load_file(tmp_path / "c")
    other = nn.Module()
    for name, parameter in module.named_parameters():
        assert_same(parameter, found[name], name)
        other.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape)))
    hetmem.load(tmp_path / "c", other)
    for name, parameter in module.named_parameters():
        assert_same(parameter, other.get_parameter(name), name)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), max_size=4), st.sampled_from([1, 2, 4, 8]), st.integers(8, 200))
def test_blocks_are_all_bytes_in_order_and_none_is_too_great(shape: list[int], width: int, limit: int) -> None:
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    tensor = torch.arange(int(np.prod(shape, dtype=int))).to(dtype).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK_BYTES", limit)
        blocks = Stored("t", dtype, tuple(shape), 0).blocks()
        assert Stored("t", dtype, tuple(shape), 0).block_count() == len(blocks)
    pieces = [tensor[block.index].reshape(-1) for block in blocks]
    assert torch.equal(torch.cat([tensor.new_empty(0), *pieces]), tensor.reshape(-1))
    assert [piece.nbytes for piece in pieces] == [block.nbytes for block in blocks]
    assert [block.offset for block in blocks] == [sum(b.nbytes for b in blocks[:n]) for n in range(len(blocks))]
    assert all(0 < block.nbytes <= limit for block in blocks)


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    module = nn.Module()
    dtypes = [torch.uint8, torch.float64, torch.bfloat16, torch.bool, torch.float32, torch.int64, torch.float16]
    for number, dtype in enumerate(dtypes):
        module.register_buffer(f"b{number}", torch.ones(3, dtype=dtype))
    hetmem.save(tmp_path / "c", module)
    data = (tmp_path / "c").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 4096 == 0
    header = json.loads(data[8 : 8 + length])
    assert [header[f"b{n}"]["data_offsets"][0] % dtype.itemsize for n, dtype in enumerate(dtypes)] == [0] * 7


# ---- extra -----------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(allow_nan=False)
)
KEYS = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()), st.none(), st.booleans())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(KEYS, inner), st.frozensets(KEYS), st.sets(KEYS)
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return same_bits(left, right)
    if isinstance(left, (np.ndarray, np.generic)):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right) if isinstance(left, (float, complex)) else bool(left == right)


@settings(max_examples=examples(25))
@given(VALUES)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    text = json.dumps(Encoder().encode(value, "extra"))
    assert same(decode(json.loads(text), None, "extra"), value)


def extras() -> dict[str, Callable[[], Any]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    schedulers = torch.optim.lr_scheduler
    return {
        "random": random.getstate,
        "numpy": lambda: np.random.get_state(legacy=False),
        "generator": lambda: np.random.default_rng(1).bit_generator.state,
        "torch": torch.get_rng_state,
        "multi step": lambda: schedulers.MultiStepLR(optimizer, [1, 2]).state_dict(),
        "one cycle": lambda: schedulers.OneCycleLR(optimizer, 0.1, 10).state_dict(),
        "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer).state_dict(),
        "sequential": lambda: schedulers.SequentialLR(
            optimizer, [schedulers.ConstantLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 5)], [3]
        ).state_dict(),
        "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: 1.0).state_dict(),
        "scaler": lambda: torch.amp.GradScaler("cpu").state_dict(),
        "optimizer": optimizer.state_dict,
        "state_dict": lambda: OrderedDict(nn.Linear(2, 2).state_dict()),
        "scalars": lambda: [np.float32(0.1), np.int64(3), torch.bfloat16, torch.Size([2, 3]), Counter("aab")],
        "tensor": lambda: torch.tensor(1.5, dtype=torch.bfloat16),
        "nothing": lambda: None,
    }


@pytest.mark.parametrize("make", extras().values(), ids=extras())
@pytest.mark.filterwarnings("ignore:Detected call of|The epoch parameter")
def test_what_programs_keep_comes_back_as_it_was(make: Callable[[], Any], tmp_path: Path) -> None:
    extra, module = make(), nn.Linear(2, 2)
    hetmem.save(tmp_path / "c", module, extra=extra)
    assert same(hetmem.load(tmp_path / "c", module), extra)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"cannot save extra → a → 1, a builtins\.function: .*runs no code"):
        hetmem.save(tmp_path / "c", module, extra={"a": [1, lambda: None]})
    with pytest.raises(CheckpointError, match=r"cannot save extra → file, a _io\.BytesIO"):
        hetmem.save(tmp_path / "c", module, extra={"file": io.BytesIO()})
    with pytest.raises(CheckpointError, match=r"cannot save extra → key, a builtins\.type"):
        hetmem.save(tmp_path / "c", module, extra={int: 1})
    with pytest.raises(CheckpointError, match=r"cannot save extra → o, a numpy\.ndarray"):
        hetmem.save(tmp_path / "c", module, extra={"o": np.array([object()])})
    with pytest.raises(CheckpointError, match=r"cannot save extra → m, a numpy\.ma\S*MaskedArray"):
        hetmem.save(tmp_path / "c", module, extra={"m": np.ma.array([1, 2], mask=[False, True])})
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(CheckpointError, match=r"cannot save sparse: it is torch\.sparse_coo of torch\.float32"):
        hetmem.save(tmp_path / "c", module)
    module.sparse = torch.empty(2, device="meta")
    with pytest.raises(CheckpointError, match=r"cannot save sparse: it is on the meta device"):
        hetmem.save(tmp_path / "c", module)
    with pytest.raises(CheckpointError, match=r"weight has no shape yet"):
        hetmem.save(tmp_path / "c", nn.LazyLinear(2))
    with pytest.raises(
        CheckpointError, match=r"parameter 0 of the optimizer, of shape \(3,\), is not one of the model"
    ):
        hetmem.save(tmp_path / "c", nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0))
    with pytest.raises(CheckpointError, match=r"expected a torch\.optim\.Optimizer, got int"):
        hetmem.save(tmp_path / "c", nn.Linear(2, 2), 3)
    with pytest.raises(CheckpointError, match=r"with a torch\.nn\.Module as model, got dict"):
        hetmem.save(tmp_path / "c", {})
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(CheckpointError, match=r"cannot save extra:n: a NestedTensor is made of several"):
        hetmem.save(tmp_path / "c", nn.Linear(2, 2), extra={"n": nested})
    assert not list(tmp_path.iterdir())


def test_a_model_named_like_the_rest_is_refused(tmp_path: Path) -> None:
    module = nn.Module()
    module.add_module("optimizer:0", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"the model has a tensor called 'optimizer:0\.weight'"):
        hetmem.save(tmp_path / "c", module)


def test_parameters_and_extra_of_one_name_do_not_meet(tmp_path: Path) -> None:
    module = nn.Module()
    module.extra = nn.Parameter(torch.ones(2))
    hetmem.save(tmp_path / "c", module, extra=torch.zeros(3))
    assert hetmem.load(tmp_path / "c", module).tolist() == [0, 0, 0]
    assert module.extra.tolist() == [1, 1]
    extra = {"a": torch.tensor(1), "a:b": torch.tensor(2), ("a",): {"b": torch.tensor(3)}, "x": {1: torch.tensor(4)}}
    extra["x"]["1"] = torch.tensor(5)
    hetmem.save(tmp_path / "c", module, extra=extra)
    assert same(hetmem.load(tmp_path / "c", module), extra)


def test_tensors_that_are_keys_come_back(tmp_path: Path) -> None:
    extra = {torch.ones(2): 1, torch.zeros(3): {torch.arange(2): "x"}}
    hetmem.save(tmp_path / "c", nn.Linear(2, 2), extra=extra)
    found = hetmem.load(tmp_path / "c", nn.Linear(2, 2))
    assert [key.tolist() for key in found] == [[1, 1], [0, 0, 0]]
    assert [key.tolist() for key in list(found.values())[1]] == [[0, 1]]


class WithExtraState(nn.Module):
    """A module with state of its own making, a tensor or not."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.ones(2)), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [{"scale": 3, "history": [1.5]}, torch.arange(3)], ids=["object", "tensor"])
def test_extra_state_of_modules_is_saved(state: Any, tmp_path: Path) -> None:
    hetmem.save(tmp_path / "c", nn.Sequential(WithExtraState(state)))
    for before in (3, torch.zeros(2)):
        other = nn.Sequential(WithExtraState(before))
        hetmem.load(tmp_path / "c", other)
        assert same(other[0].state, state)


def test_tied_tensors_reach_a_module_that_makes_up_its_state(tmp_path: Path) -> None:
    """The second name was not loaded."""
    saved, module = (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
    saved[1].weight = saved[0].weight
    module.register_state_dict_post_hook(
        lambda _, state, *__: state.update({name: value.clone() for name, value in state.items()})
    )
    hetmem.save(tmp_path / "c", saved)
    hetmem.load(tmp_path / "c", module)
    assert torch.equal(saved[0].weight, module[0].weight)
    assert torch.equal(saved[0].weight, module[1].weight)


# ---- no code ---------------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Evil()}, tmp_path / "c")
    with pytest.raises(CheckpointError):
        hetmem.load(tmp_path / "c", nn.Linear(2, 2))
    array = np.empty(1, dtype=object)
    array[0] = Evil()
    for dtype in ("|O", "V8", [["x", "|O"]]):
        with pytest.raises(CheckpointError, match="not understood"):
            decode({"array": [dtype, [1], "AAAAAAAAAAA="]}, None, "extra")
    for value in ({"os.system": "touch evil"}, {"dtype": "os"}, {"tuple": 1}, {}, {"a": 1, "b": 2}, {"array": ["<f4"]}):
        with pytest.raises(CheckpointError, match="not understood"):
            decode(value, None, "extra")
    assert not (tmp_path / "evil").exists()
    names = {name for path in Path(layout.__file__).parent.glob("*.py") for name in path.read_text().split()}
    assert not names & {"pickle", "torch.load", "eval", "exec", "marshal", "importlib"}


NO_VALUES = (
    '{"__metadata__":{"hetmem.version":"1","hetmem.header_crc32":""},'
    '"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]}}'
)
HEADERS: dict[str, tuple[Any, str]] = {
    "deep": ('{"a":{"shape":' + "[" * 4000 + "}", "a is not understood"),
    "text": ("text", "expected '{' at character 0, got 't'"),
    "list": ([], "expected '{' at character 0"),
    "overlap": ({"a": {}, "b": {"data_offsets": [2, 6]}}, "b begins at byte 2 of the data, not 4"),
    "hole": ({"a": {}, "b": {"shape": [1], "data_offsets": [5, 6]}}, "b begins at byte 5 of the data, not 4"),
    "rest": ({"a": {}}, "6 bytes of data, its header says 4"),
    "size": ({"a": {"shape": [1 << 62], "data_offsets": [0, 1 << 62]}}, "its header says 4611686018427387904"),
    "bytes": ({"a": {"shape": [6]}}, "a of 6 bytes lies at"),
    "negative": (
        {"a": {"shape": [-1]}},
        r"a\.shape\[0\]: expected a whole number, 0 or more, got -1",
    ),
    "dtype": ({"a": {"dtype": "X"}}, "a has elements of 'X'"),
    "dimensions": ({"a": {"shape": [1] * 100_000}}, "a: expected an object with dtype, shape and data_offsets"),
    "checks": ({"a": {"shape": [6], "data_offsets": [0, 6]}}, "not one checksum for each block"),
    "no values": (NO_VALUES, r"\['hetmem.tied'\] is missing"),
}


@pytest.mark.parametrize(("table", "match"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies_is_refused(table: Any, match: str, tmp_path: Path) -> None:
    if isinstance(table, dict):
        own = dict.fromkeys(("hetmem.tied", "hetmem.objects", "hetmem.crc32"), "{}")
        own |= {"hetmem.extra": "null", "hetmem.version": "1", "hetmem.header_crc32": ""}
        table = {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **one} for name, one in table.items()}
        table.setdefault("__metadata__", own)
    text = (table if isinstance(table, str) else json.dumps(table)).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header, "_check_sum", lambda data, check: None)  # whoever lies can make a checksum
        (tmp_path / "c").write_bytes(len(text).to_bytes(8, "little") + text + bytes(6))
        with pytest.raises(CheckpointError, match=rf"cannot load .*{match}"):
            hetmem.load(tmp_path / "c", nn.Linear(2, 2))
