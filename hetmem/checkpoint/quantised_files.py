"""Quantised weights in files of other programs: which tensors are one weight, and its bytes as hetmem keeps them.

    bitsandbytes, 4 bits  X.weight uint8, .absmax, .quant_map, .quant_state.bitsandbytes__nf4 (JSON), .nested_…
    bitsandbytes, 8 bits  X.weight int8, X.SCB float32, a scale a row
    DeepSeek's fp8        X.weight E4M3, X.weight_scale_inv float32, a scale for 128 x 128
    MXFP4                 X_blocks uint8, X_scales uint8, for 32 elements along the last dimension, or of gpt-oss's
                          experts along the last but one, which files have last

Sizes and scales are checked before anything is written. Codes go from the file to the home; nothing is decoded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetmem.base.schema import SchemaError, list_of, number, record, shown, text, whole
from hetmem.checkpoint.coded import CodedWeight
from hetmem.checkpoint.disk import Source, read_tensors
from hetmem.checkpoint.layout import MAX_DIMENSIONS
from hetmem.cuda.dequantise import NF4, nested_values
from hetmem.errors import CheckpointError
from hetmem.memory.coded import in_host_memory
from hetmem.schedule.formats import NESTED_BLOCK, NF4_BLOCK, Coding

_STATE = ".quant_state.bitsandbytes__"
_ENDS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", f"{_STATE}nf4", f"{_STATE}fp4", "_scale_inv")
"""What the names of scales and maps add to that of their weight."""
_MOST_STATE_BYTES = 1 << 16
_NESTED = {"nested_blocksize": whole(), "nested_offset": number(-1e30, 1e30), "nested_dtype": text()}
_STATE_SHAPE = record(
    {"quant_type": text(), "blocksize": whole(), "dtype": text(), "shape": list_of(whole(), most=MAX_DIMENSIONS)},
    _NESTED,
    others=True,
)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedTensor:
    """A weight of `shape` in the files, which call it `name`. `codes`, `scales` and `nested`: the tensors with its
    bytes; `offset`, of nested scales."""

    name: str
    coding: Coding
    shape: tuple[int, ...]
    codes: Source
    scales: Source
    nested: Source | None = None
    offset: float = 0.0

    def check(self) -> None:
        """Read the scales. Raises `CheckpointError` for one that is not finite."""
        for source in (self.scales, self.nested):
            if source is None:
                continue
            found = _read(source)
            bad = found == 255 if self.coding.format == "mxfp4" else ~found.isfinite()
            if bool(bad.any()):
                raise CheckpointError(f"{source.stored.name} in the files has a scale that is no finite number")

    def fill(self, weight: CodedWeight) -> None:
        """Read the bytes to the home of `weight`, which has this coding."""
        with in_host_memory(weight.codes) as home:
            self._fill(home)

    def _fill(self, home: torch.Tensor) -> None:
        spans = [(self.codes, self.coding.codes_span), (self.scales, self.coding.scales_span)]
        if self.nested is not None:
            start, nbytes = self.coding.nested_span
            levels = home[start : start + nbytes].view(torch.float32)
            levels[0] = self.offset
            read_tensors(self.nested.file, [(self.nested.stored, levels[1:].view(self.nested.stored.shape))])
        for source, (start, nbytes) in spans:
            target = home[start : start + nbytes].view(source.stored.dtype).view(source.stored.shape)
            read_tensors(source.file, [(source.stored, target)])
        codes = home[: self.coding.codes_span.nbytes]
        if self.coding.format == "fp8" and bool(((codes & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{self.name} in the files has codes that are no numbers")

    def differences(self, name: str, weight: CodedWeight | None) -> list[str]:
        """Return why the model's `weight` called `name` cannot take these bytes."""
        way = f"manage the model with frozen={self.coding.format!r}"
        if weight is None:
            return [f"{name} is quantised in the files, as {self.coding.format}, and not in the model: {way}"]
        if weight.coding.format == "mxfp4-transposed" and self.coding.format == "mxfp4":
            of_model = *self.shape[:-2], self.shape[-1], self.shape[-2]  # whose codes lie in the same order
        else:
            of_model = self.shape
        if tuple(weight.managed.shape) != of_model:
            return [f"{name} has the shape {self.shape} in the files, and {tuple(weight.managed.shape)} in the model"]
        if weight.coding.public_format != self.coding.format or weight.coding.format == "int8-torchao":
            return [f"{name} is {self.coding.format} in the files and {weight.coding.format} in the model: {way}"]
        return []


def renamed(rename: Callable[[str], str | None] | None) -> Callable[[str], str | None] | None:
    """Return `rename` for all names in files: scales and maps follow their weight."""
    if rename is None:
        return None

    def all_of_one(key: str) -> str | None:
        base, begin, end = _owner(key)
        new = rename(base) if base != key else None
        return rename(key) if new is None or not new.endswith(begin) else new[: len(new) - len(begin)] + end

    return all_of_one


def _owner(key: str) -> tuple[str, str, str]:
    """Return the name of the weight that `key` belongs to, and which end of that is replaced by what in `key`."""
    for end in _ENDS:
        if key.endswith(end):
            return key.removesuffix(end), "", end
    for end in (".SCB", ".weight_format"):
        if key.endswith(end):
            return f"{key.removesuffix(end)}.weight", ".weight", end
    for end in ("_blocks", "_scales"):
        if key.endswith(end):
            return key.removesuffix(end), "", end
    return key, "", ""


def grouped(sources: Mapping[str, Source]) -> tuple[dict[str, Source], dict[str, QuantisedTensor]]:
    """Return `sources` with one entry for each weight, and the quantised ones by that name. Raises `CheckpointError`
    for tensors that do not belong together."""
    rest, found = dict(sources), dict[str, QuantisedTensor]()
    for key in sources:
        base = _owner(key)[0]
        state = next((f"{base}{_STATE}{kind}" for kind in ("nf4", "fp4") if f"{base}{_STATE}{kind}" in rest), None)
        if base in found or key not in rest:
            continue
        if state is not None:
            found[base] = _of_bitsandbytes(base, state, rest)
            names = [base + end for end in _ENDS]
        elif f"{base}_scale_inv" in rest and base in rest:
            found[base] = _of_tiles(base, rest[base], rest[f"{base}_scale_inv"])
            names = [f"{base}_scale_inv"]
        elif (rows := f"{base.removesuffix('.weight')}.SCB") in rest and base in rest and base.endswith(".weight"):
            found[base] = _of_rows(base, rest[base], rest[rows])
            names = [rows, f"{base.removesuffix('.weight')}.weight_format"]
        elif f"{base}_blocks" in rest and f"{base}_scales" in rest:
            found[base] = _of_blocks(base, rest[f"{base}_blocks"], rest[f"{base}_scales"])
            names = [f"{base}_blocks", f"{base}_scales"]
        else:
            continue
        for name in names:
            rest.pop(name, None)
        rest[base] = found[base].codes
    return rest, found


def _read(source: Source) -> torch.Tensor:
    values = torch.empty(source.stored.shape, dtype=source.stored.dtype, device="cpu")
    read_tensors(source.file, [(source.stored, values)])
    return values


def _checked(name: str, source: Source, dtype: torch.dtype, shape: tuple[int, ...] | None, numel: int) -> Source:
    stored = source.stored
    if stored.dtype is not dtype or math.prod(stored.shape) != numel or shape not in (None, stored.shape):
        raise CheckpointError(
            f"{name}: {stored.name} in the files is {stored.shape} of {stored.dtype}, expected "
            f"{numel if shape is None else shape} of {dtype}"
        )
    return source


def _of_bitsandbytes(name: str, state_name: str, sources: Mapping[str, Source]) -> QuantisedTensor:
    state = _state(name, sources[state_name])
    missing = [end for end in ("", ".absmax", ".quant_map") if name + end not in sources]
    nested = "nested_blocksize" in state
    missing += [end for end in (".nested_absmax", ".nested_quant_map") if nested and name + end not in sources]
    if missing:
        raise CheckpointError(f"{name} is quantised in the files, which have no {name}{missing[0]}")
    sizes = {"quant_type": "nf4", "blocksize": NF4_BLOCK}
    sizes |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"} if nested else {}
    for key, expected in sizes.items():
        if state.get(key) != expected:
            raise CheckpointError(f"{name} in the files has the {key} {shown(state.get(key))}: only {expected} is read")
    if nested and "nested_offset" not in state:
        raise CheckpointError(f"{name} in the files has nested scales without their offset")
    shape = tuple(state["shape"])
    coding = Coding.of("nf4-nested" if nested else "nf4", shape)
    _same_values(name, sources[f"{name}.quant_map"], torch.tensor(NF4))
    codes = _checked(name, sources[name], torch.uint8, None, coding.codes_span.nbytes)
    scale = torch.uint8 if nested else torch.float32
    scales = _checked(name, sources[f"{name}.absmax"], scale, None, coding.scales)
    if not nested:
        return QuantisedTensor(name, coding, shape, codes, scales)
    _same_values(name, sources[f"{name}.nested_quant_map"], nested_values())
    levels = _checked(name, sources[f"{name}.nested_absmax"], torch.float32, None, coding.nested - 1)
    return QuantisedTensor(name, coding, shape, codes, scales, levels, float(state["nested_offset"]))


def _state(name: str, source: Source) -> dict[str, Any]:
    """Return the JSON that bitsandbytes keeps as a tensor. Raises `CheckpointError`."""
    stored = source.stored
    if stored.dtype is not torch.uint8 or len(stored.shape) != 1 or stored.nbytes > _MOST_STATE_BYTES:
        raise CheckpointError(f"{stored.name} in the files is {stored.shape} of {stored.dtype}: no state of {name}")
    try:
        state = json.loads(bytes(_read(source).tolist()).decode("utf-8"))
        _STATE_SHAPE(state)
    except (ValueError, RecursionError, SchemaError) as error:
        raise CheckpointError(f"{stored.name} in the files is not understood: {error}") from error
    return dict(state)


def _same_values(name: str, source: Source, expected: torch.Tensor) -> None:
    """Raise `CheckpointError` unless `source` has the values of codes that hetmem decodes to."""
    _checked(name, source, torch.float32, None, expected.numel())
    if not torch.equal(_read(source).flatten(), expected):
        raise CheckpointError(f"{source.stored.name} in the files has other values than those of the format")


def _of_tiles(name: str, codes: Source, scales: Source) -> QuantisedTensor:
    shape = codes.stored.shape
    coding = Coding.of("fp8", shape)
    if codes.stored.dtype is not torch.float8_e4m3fn or len(shape) < 2 or shape[-1] != coding.columns:
        raise CheckpointError(f"{name} in the files is {shape} of {codes.stored.dtype}, beside scales of fp8")
    return QuantisedTensor(
        name, coding, shape, codes, _checked(name, scales, torch.float32, (*shape[:-2], *coding.grid), coding.scales)
    )


def _of_rows(name: str, codes: Source, scales: Source) -> QuantisedTensor:
    shape = codes.stored.shape
    coding = Coding.of("int8", shape)
    if codes.stored.dtype is not torch.int8 or len(shape) != 2 or shape[-1] != coding.columns:
        raise CheckpointError(f"{name} in the files is {shape} of {codes.stored.dtype}, beside scales of int8")
    return QuantisedTensor(name, coding, shape, codes, _checked(name, scales, torch.float32, None, coding.scales))


def _of_blocks(name: str, blocks: Source, scales: Source) -> QuantisedTensor:
    if len(blocks.stored.shape) < 2:
        raise CheckpointError(f"{blocks.stored.name} in the files has the shape {blocks.stored.shape}: no blocks of 16")
    *rows, groups, half = blocks.stored.shape
    shape = (*rows, groups * 2 * half)
    coding = Coding.of("mxfp4", shape)
    codes = _checked(name, blocks, torch.uint8, (*rows, groups, 16), coding.codes_span.nbytes)
    return QuantisedTensor(
        name, coding, shape, codes, _checked(name, scales, torch.uint8, (*rows, groups), coding.scales)
    )
