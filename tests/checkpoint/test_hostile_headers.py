"""Files of other programs that anybody may have made, or no files at all: what is loaded is what safetensors reads, and
the rest is refused and changes nothing. Nothing is waited for; a header takes the memory of its text."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import hetmem
from hetmem.checkpoint import layout
from hetmem.errors import CheckpointError, HetmemError, StoreError
from tests.checkpoint.test_all_or_nothing import equal
from tests.checkpoint.test_hostile import kept, sealed
from tests.forked import end_in_a_fork

# ---- files of other programs -----------------------------------------------------------------------------------------


def damaged(data: bytes, seed: int) -> Iterator[bytes]:
    """Files of safetensors with a few bytes of the header changed, put in, taken out or there twice, or cut."""
    chance, end = random.Random(seed), 8 + int.from_bytes(data[:8], "little")
    while True:
        head, rest = bytearray(data[8:end]), data[end:]
        for _ in range(chance.choice((1, 1, 1, 3))):
            place = chance.randrange(len(head))
            kind = chance.randrange(5)
            if kind == 0:
                head[place] ^= 1 << chance.randrange(8)
            elif kind == 1:
                head[place:place] = chance.choice(
                    (b"[", b"{", b",", b'"', b"0", b".0", b"e9", b"-", b"\\u0000", b"\xff")
                )
            elif kind == 2:
                del head[place : place + chance.choice((1, 2, 20))]
            elif kind == 3:
                other = chance.randrange(len(head))
                head[place:place] = head[other : other + chance.choice((1, 5, 60))]
            else:
                rest = rest[: chance.randrange(len(rest) + 1)]
        yield chance.choice((len(head), len(head), len(head) - 1)).to_bytes(8, "little") + bytes(head) + rest


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_damaged_files_of_other_programs_load_as_they_are_or_not_at_all(seed: int, tmp_path: Path) -> None:
    path, module = tmp_path / "c", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    values = {name: torch.rand_like(value.float()).to(value.dtype) for name, value in module.state_dict().items()}
    safetensors.torch.save_file(values, path, {"format": "pt"})
    taken, count = 0, 5000 if seed else 60
    for number, data in zip(range(count), damaged(path.read_bytes(), seed), strict=False):
        path.write_bytes(data)
        before = kept(module.state_dict())
        try:
            hetmem.load_weights(path, module, strict=number % 2 == 0)
        except HetmemError as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert "partly loaded" not in said
            assert equal(before, kept(module.state_dict()))
            continue
        taken += 1
        theirs = safetensors.torch.load_file(path)
        assert all(equal(theirs[name], value) for name, value in module.state_dict().items() if name in theirs)
    assert taken < count / 5


ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
TABLES: dict[str, tuple[bytes, str]] = {
    "twice": (f'{{"p":{ENTRY},"p":{ENTRY}}}'.encode(), "it has the key 'p' twice"),
    "twice within": (ENTRY.replace("[2],", '[2],"shape":[2],').join(('{"p":', "}")).encode(), "the key 'shape' twice"),
    "mark": (b"\xef\xbb\xbf" + f'{{"p":{ENTRY}}}'.encode(), r"expected '\{' at character 0, got '\\ufeff'"),
    "UTF-16": (f'{{"p":{ENTRY}}}'.encode("utf-16"), "'utf-8' codec can't decode"),
    "UTF-32": (f'{{"p":{ENTRY}}}'.encode("utf-32-le"), "at character 1"),
    "floats": (f'{{"p":{ENTRY}}}'.replace("0,8", "0.0,8.0").encode(), r"p\.data_offsets\[0\]: expected a whole number"),
    "more": (f'{{"p":{ENTRY}}}}}'.encode(), "something follows its end"),
    "no text": (f'{{"__metadata__":{{"a":1}},"p":{ENTRY}}}'.encode(), "expected '\"' at character 21, got '1'"),
    "an unheard of key": (f'{{"p":{ENTRY[:-1]},"more":1}}}}'.encode(), "p has no key 'more'"),
}


@pytest.mark.parametrize(("text", "match"), TABLES.values(), ids=TABLES)
def test_a_table_that_is_not_plain_is_refused(text: bytes, match: str, tmp_path: Path) -> None:
    module = nn.Module()
    module.p = nn.Parameter(torch.ones(2))
    (tmp_path / "c").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=match):
        hetmem.load_weights(tmp_path / "c", module)
    assert module.p.tolist() == [1, 1]


INDICES: dict[str, tuple[str, str]] = {
    "NUL": ('{"weight_map": {"weight": "a\\u0000b"}}', "weight_map.weight: expected text"),
    "surrogate": ('{"weight_map": {"weight": "a\\ud800"}}', "has a NUL or a lone surrogate"),
    "number": ('{"weight_map": {"weight": 3}}', "weight_map.weight: expected text"),
    "list": ("[]", r"expected an object, got \[\]"),
    "none": ("{}", "weight_map is missing"),
    "twice": ('{"weight_map": {"weight": "a", "weight": "b"}}', "it has the key 'weight' twice"),
    "deep": ("[" * 100_000, "it is nested too deeply"),
}


@pytest.mark.parametrize(("text", "match"), INDICES.values(), ids=INDICES)
def test_an_index_that_lies_is_refused(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=match):
        hetmem.load_weights(tmp_path, nn.Linear(2, 2))


# ---- what is no file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [hetmem.load, hetmem.load_weights])
def test_pipes_and_devices_are_not_waited_for(load: Callable[[Path, nn.Module], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "i.safetensors.index.json").write_text('{"weight_map": {"weight": "pipe"}}')
    os.mkfifo(tmp_path / "j.safetensors.index.json")
    signal.alarm(60)
    try:
        for name in ("pipe", "link", "/dev/zero", *(["i", "j"] if load is hetmem.load_weights else [])):
            path = tmp_path / (f"{name}.safetensors.index.json" if len(name) == 1 else name)
            with pytest.raises(CheckpointError, match="it is no regular file"):
                load(path, nn.Linear(2, 2))
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_path_that_no_file_can_have_is_refused(name: str, tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    for act in (hetmem.save, hetmem.load, hetmem.load_weights):
        with pytest.raises(StoreError, match=r"no file can have this name|there is no file"):
            act(f"{tmp_path}/{name}", module)
    assert not list(tmp_path.iterdir())


# ---- how much a header may be ----------------------------------------------------------------------------------------

BOMBS: dict[str, Callable[[int], bytes]] = {
    "lists": lambda size: b'{"a":{"shape":[' + b"[]," * (size // 3) + b"[]]}}",
    "lists in the metadata": lambda size: b'{"__metadata__":{"a":[' + b"[]," * (size // 3) + b"[]]}}",
    "spaces": lambda size: b"{" + b" " * size + b"}",
    "depth": lambda size: b'{"a":' + b"[" * size,
    "text": lambda size: b'{"__metadata__":{"a":"' + b"x" * size + b'"}}',
    "keys": lambda size: b"{" + b'"a":{},' * (size // 7) + b'"b":{}}',
    "escapes": lambda size: b'{"' + b"\\" * size + b'":{}}',
    "sizes": lambda size: b'{"a":{"shape":[' + b"1," * (size // 2) + b"1]}}",
    "extra": lambda size: sealed(
        {
            "__metadata__": {
                **{f"hetmem.{name}": {} for name in ("tied", "objects", "crc32")},
                **{"hetmem.version": "1", "hetmem.header_crc32": "", "hetmem.extra": [[]] * (size // 4)},
            }
        },
        b"",
    )[8:],
}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("size", [94_000_000, 16_000_000])
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("load", [hetmem.load, hetmem.load_weights])
def test_a_header_that_names_nothing_takes_no_more_memory_than_its_text(
    load: Callable[[Path, nn.Module], object], bomb: Callable[[int], bytes], size: int, tmp_path: Path
) -> None:
    text, module = bomb(size), nn.Linear(2, 2)
    (tmp_path / "c").write_bytes(len(text).to_bytes(8, "little") + text)

    def status(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10

    def load_it() -> None:
        Path("/proc/self/clear_refs").write_text("5")
        before, began = status("VmRSS"), resource.getrusage(resource.RUSAGE_SELF).ru_utime
        with pytest.raises(CheckpointError):
            load(tmp_path / "c", module)
        assert status("VmHWM") - before < 1.5 * len(text) + (32 << 20)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - began < 5

    assert end_in_a_fork(load_it) == 0


def test_what_a_header_may_not_have_is_not_saved_and_what_it_may_have_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_VALUES", 100)
    monkeypatch.setattr(layout, "_VALUES_EACH", 0)
    module, path = nn.Linear(2, 2), tmp_path / "c"
    hetmem.save(path, module, extra=["a,b[c{", '"', "\\"] * 33)
    assert hetmem.load(path, module) == ["a,b[c{", '"', "\\"] * 33
    with pytest.raises(CheckpointError, match=r"hetmem\.extra would have more than 100 values: put large values into"):
        hetmem.save(path, module, extra=list(range(100)))
    assert len(hetmem.load(path, module)) == 99
    monkeypatch.setattr(layout, "_HEADER_BYTES", 8192)
    monkeypatch.setattr(layout, "_HEADER_BYTES_EACH", 100)
    with pytest.raises(
        CheckpointError, match=r"the header would take \d+ bytes \(.*\), and may take 4296 with 2 tensors"
    ):
        hetmem.save(path, module, extra="x" * 4000)
    for size in range(2500, 4000, 100):
        try:
            hetmem.save(path, module, extra="x" * size)
        except CheckpointError:
            break
        assert hetmem.load(path, module) == "x" * size
    assert 2500 < size < 4000


def test_names_that_no_file_may_have_are_not_saved(tmp_path: Path) -> None:
    module = nn.Module()
    module.add_module("a\0", nn.Linear(2, 2))
    with pytest.raises(
        CheckpointError, match=r"'a\\x00\.weight' has a NUL or a lone surrogate, which a checkpoint cannot"
    ):
        hetmem.save(tmp_path / "c", module)
    extra = {"a\0": torch.ones(1), "a\\0": torch.ones(2), "b\ud800": torch.ones(3)}
    hetmem.save(tmp_path / "c", nn.Linear(2, 2), extra=extra)
    found = hetmem.load(tmp_path / "c", nn.Linear(2, 2))
    assert {name: len(value) for name, value in found.items()} == {"a\0": 1, "a\\0": 2, "b\ud800": 3}
