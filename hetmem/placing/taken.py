"""Takes over weights that another library has quantised before `manage`: their codes become homes.

    bitsandbytes   Params4bit of Linear4bit (nf4), Int8Params of Linear8bitLt
    torchao        Int8Tensor with a scale a row, MXTensor of E2M1
    transformers   FP8Linear with a scale for 128 x 128

A module keeps its class and gets the forward of a plain linear layer over decoded values: bitsandbytes' own functions
hold the codes from a forward to its backward, where no hook sees them. Libraries are known by names, not imported. All
refusals come before anything changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NoReturn

import torch
from torch.nn import functional

from hetmem.base.warning import warn_user
from hetmem.cuda.dequantise import NF4, nested_values, parts_of
from hetmem.engine.param_views import exchange_kind
from hetmem.errors import ManageError
from hetmem.schedule.formats import MX_BLOCK, NESTED_BLOCK, NF4_BLOCK, Coding

_HALVES = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OTHERS = {
    "qweight": "GPTQ, AWQ or a relative of theirs",
    "weight_packed": "compressed-tensors",
    "weight_scale": "compressed-tensors, or fp8 with scales of rows or tensors",
    "W_q": "HQQ",
}
"""What has quantised a module with a buffer, a parameter or an attribute of that name."""
_MODULES = {"Mxfp4GptOssExperts": "MXFP4", "FP8Experts": "fp8", "GgufLinear": "GGUF", "GgufExperts": "GGUF"}
_INSTEAD = (
    "build the model in 16 bits, or on meta, give hetmem.manage frozen=… and read the files with hetmem.load_weights"
)


@dataclass(slots=True, eq=False)
class TakenWeight:
    """A weight of `module` that a library has quantised: its `coding`, and its `codes`, `scales` and `levels` as bytes.
    `parameter` has the true shape on `meta` once it is taken, and `before`, a tensor for its old C++ object, `kind` and
    `own`, its old class and attributes."""

    name: str
    module: torch.nn.Module
    parameter: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    coding: Coding
    codes: torch.Tensor
    scales: torch.Tensor
    levels: torch.Tensor | None = None
    forward: Any = None
    quantises_inputs: bool = False
    before: Any = None
    kind: type = torch.nn.Parameter
    own: dict[str, Any] = field(default_factory=dict)

    def fill(self, coded: torch.Tensor) -> None:
        """Write the bytes to the home `coded`."""
        codes, scales, levels = parts_of(self.coding, coded, 0, self.coding.numel)
        coded.zero_()
        codes.copy_(self.codes)
        scales.copy_(self.scales)
        if self.levels is not None:
            levels.copy_(self.levels)

    def forget(self) -> None:
        """Forget the bytes, which a home has, and what the parameter was before."""
        if (state := vars(self.module).get("state")) is not None:  # of bitsandbytes' Linear8bitLt
            state.CB = state.SCB = None
        if "quant_state" in vars(self.module):
            vars(self.module)["quant_state"] = None
        self.codes = self.scales = self.before = self.levels = None  # type: ignore[assignment]
        self.own.clear()

    def take(self) -> None:
        """Make the parameter an ordinary one, on `meta`; the same object."""
        alone = torch.nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="meta"), requires_grad=False)
        self.kind, self.before = type(self.parameter), alone
        exchange_kind(self.parameter, torch.nn.Parameter, alone)
        for name in _HOLDERS & self.parameter.__dict__.keys():
            self.own[name] = self.parameter.__dict__.pop(name)
        if self.forward is not None:
            self.module.forward = MethodType(self.forward, self.module)

    def give_back(self) -> None:
        """Undo `take`, unless it is forgotten."""
        if self.before is not None:
            exchange_kind(self.parameter, self.kind, self.before)
            self.parameter.__dict__.update(self.own)
            if self.forward is not None:
                del self.module.forward


_HOLDERS = {"quant_state", "CB", "SCB", "qdata", "scale", "zero_point"}
"""Attributes of parameters that hold codes or scales."""


class TakenOver:
    """The weights of one model that a library has quantised, by `id` of their parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Look for them. Raises `ManageError` for one that cannot be taken; nothing is changed."""
        self.found = {id(each.parameter): each for each in _quantised(module)}

    def take(self) -> None:
        """Make them ordinary parameters on `meta`. Warns if results change."""
        for each in self.found.values():
            each.take()
        changed = sorted({type(each.module).__name__ for each in self.found.values() if each.quantises_inputs})
        if changed:
            warn_user(
                f"{', '.join(changed)} quantised its inputs, too: under hetmem it computes in 16 bits with the decoded "
                f"weights, so results change a little"
            )

    def give_back(self) -> None:
        """Undo `take`."""
        for each in self.found.values():
            each.give_back()

    def forget(self) -> None:
        """Forget what the weights were before, as the model is managed."""
        for each in self.found.values():
            each.forget()

    def codings(self) -> dict[str, Coding]:
        """Return their codings by name."""
        return {each.name: each.coding for each in self.found.values()}

    def of(self, parameter: torch.Tensor) -> TakenWeight | None:
        """Return the weight that `parameter` is, or None."""
        return self.found.get(id(parameter))


def _quantised(model: torch.nn.Module) -> Iterator[TakenWeight]:
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # refused later
            continue
        path = f"{prefix}." if prefix else ""
        tensors = {*module._parameters, *module._buffers, *vars(module)}
        by = next((f"{name!r}, of {_OTHERS[name]}" for name in _OTHERS if name in tensors), None)
        if by is None and type(module).__name__ in _MODULES:
            by = f"{type(module).__name__}, of {_MODULES[type(module).__name__]}"
        if by is not None:
            raise ManageError(f"{prefix or 'the model'} is quantised ({by}), which hetmem does not read: {_INSTEAD}")
        for name, parameter in module._parameters.items():
            if parameter is not None and (found := _weight(model, module, path + name, parameter)) is not None:
                if parameter.requires_grad:
                    raise ManageError(f"{path}{name} is quantised and trained: call its requires_grad_(False) first")
                yield found


def _weight(model: torch.nn.Module, module: Any, name: str, parameter: Any) -> TakenWeight | None:
    """Return what `parameter`, of `module`, is if a library has quantised it. Raises `ManageError`."""
    kind, library = type(parameter).__name__, type(parameter).__module__.partition(".")[0]
    if library == "bitsandbytes":
        if kind == "Params4bit":
            return _of_4bit(module, name, parameter)
        if kind == "Int8Params" and parameter.dtype is torch.int8:
            return _of_rows(model, module, name, parameter)
        return None
    if library == "torchao":
        if kind == "Int8Tensor":
            return _of_int8_tensor(module, name, parameter)
        if kind == "MXTensor":
            return _of_mx_tensor(module, name, parameter)
        _refuse(name, f"is torchao's {kind}, which decodes to values that no format of hetmem has")
    if parameter.dtype in _FP8 and hasattr(module, f"{name.rpartition('.')[2]}_scale_inv"):
        return _of_tiles(model, module, name, parameter)
    return None


def _refuse(name: str, why: str) -> NoReturn:
    raise ManageError(f"{name} {why}: {_INSTEAD}")


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().flatten().view(torch.uint8)


def _checked(found: TakenWeight) -> TakenWeight:
    """Return `found`. Raises `ManageError` unless its parts have the sizes of its coding."""
    coding, levels = found.coding, 0 if found.levels is None else found.levels.numel()
    parts = found.codes.numel(), found.scales.numel(), levels
    spans = coding.codes_span.nbytes, coding.scales_span.nbytes, coding.nested_span.nbytes
    if parts != spans:
        _refuse(found.name, f"has {parts} bytes of codes and scales, expected {spans} for {found.shape}")
    return found


def _plain(module: Any, name: str, kinds: tuple[str, ...]) -> None:
    """Raise `ManageError` unless `module` is one whose plain class has the forward of a linear layer."""
    if not isinstance(module, torch.nn.Linear) or type(module).__name__ not in kinds:
        _refuse(name, f"is a quantised weight of a {type(module).__name__}, expected {' or '.join(kinds)}")


def _of_4bit(module: Any, name: str, parameter: Any) -> TakenWeight:
    _plain(module, name, ("Linear4bit", "LinearNF4", "LinearFP4"))
    state = getattr(parameter, "quant_state", None) or module.quant_state
    if state is None:
        _refuse(name, "is a Params4bit that bitsandbytes has not quantised (it does so as it moves to a device)")
    nested = state.state2 if state.nested else None
    facts = {"quant_type": (state.quant_type, "nf4"), "blocksize": (state.blocksize, NF4_BLOCK)}
    if nested is not None:
        facts["nested blocksize"] = nested.blocksize, NESTED_BLOCK
    for what, (got, expected) in facts.items():
        if got != expected:
            _refuse(name, f"has the {what} {got!r}, of which only {expected!r} is taken")
    if getattr(state, "packing_format_for_cpu", False):
        _refuse(name, "was packed for kernels of the CPU by a forward in eval(): manage the model before its first one")
    maps = [(state.code, torch.tensor(NF4))] + ([(nested.code, nested_values())] if nested is not None else [])
    if not all(torch.equal(own.cpu().flatten(), expected) for own, expected in maps):
        _refuse(name, "has other values of codes than nf4")
    levels = None
    if nested is not None:
        levels = torch.cat([state.offset.detach().reshape(1).float(), nested.absmax.flatten()])
    coding = Coding.of("nf4" if nested is None else "nf4-nested", state.shape)
    scales = state.absmax if nested is not None else state.absmax.float()
    own = _bytes(parameter.data), _bytes(scales), None if levels is None else _bytes(levels)
    dtype = module.compute_dtype or state.dtype  # the library decodes to that of its inputs
    return _checked(
        TakenWeight(name, module, parameter, tuple(state.shape), dtype, coding, *own, forward=_linear_of_4bit)
    )


def _of_rows(model: torch.nn.Module, module: Any, name: str, parameter: Any) -> TakenWeight:
    _plain(module, name, ("Linear8bitLt",))
    scales = parameter.SCB if parameter.SCB is not None else module.state.SCB
    if scales is None:
        _refuse(name, "is an Int8Params without its SCB")
    coding = Coding("int8", 1, *parameter.shape)
    return _in_16_bits(model, module, name, parameter, coding, _bytes(parameter.data), _bytes(scales.float()))


def _of_int8_tensor(module: Any, name: str, parameter: Any) -> TakenWeight:
    _plain(module, name, ("Linear",))
    shape = tuple(parameter.shape)
    zeros = getattr(parameter, "zero_point", None)
    if [*parameter.block_size] != [1, shape[-1]] or parameter.scale.dtype is not torch.float32:
        _refuse(name, "is an Int8Tensor with other scales than a float32 a row")
    if (zeros is not None and bool(zeros.any())) or getattr(parameter, "act_pre_scale", None) is not None:
        _refuse(name, "is an Int8Tensor with zero points, or that scales its inputs")
    coding = Coding("int8-torchao", 1, *shape)
    own = _bytes(parameter.qdata), _bytes(parameter.scale)
    given = getattr(parameter, "act_quant_kwargs", None) is not None
    return _checked(TakenWeight(name, module, parameter, shape, parameter.dtype, coding, *own, quantises_inputs=given))


def _of_mx_tensor(module: Any, name: str, parameter: Any) -> TakenWeight:
    _plain(module, name, ("Linear",))
    if parameter.elem_dtype is not torch.float4_e2m1fn_x2 or parameter.block_size != MX_BLOCK:
        _refuse(name, f"is an MXTensor of {parameter.elem_dtype} in blocks of {parameter.block_size}, not mxfp4")
    if parameter.is_swizzled_scales or not parameter.qdata.is_contiguous():
        _refuse(name, "is an MXTensor whose codes or scales are in another order than that of rows")
    shape = tuple(parameter.shape)
    scales = _bytes(parameter.scale.view(torch.uint8))
    if bool((scales == 255).any()):
        _refuse(name, "has a scale that is no number")
    own = _bytes(parameter.qdata), scales
    given = getattr(parameter, "act_quant_kwargs", None) is not None
    coding = Coding.of("mxfp4", shape)
    return _checked(TakenWeight(name, module, parameter, shape, parameter.dtype, coding, *own, quantises_inputs=given))


def _of_tiles(model: torch.nn.Module, module: Any, name: str, parameter: Any) -> TakenWeight:
    _plain(module, name, ("FP8Linear",))
    shape, scales = tuple(parameter.shape), module.weight_scale_inv.detach()
    coding = Coding("fp8", 1, *shape)
    block = tuple(getattr(module, "block_size", None) or ())
    if parameter.dtype is not torch.float8_e4m3fn or block != (128, 128) or tuple(scales.shape) != coding.grid:
        _refuse(name, f"is {parameter.dtype} with blocks of {block or 'a tensor'}, not E4M3 with a scale for 128 x 128")
    codes = _bytes(parameter.data)
    if bool(((codes & 0x7F) == 0x7F).any()) or not scales.float().isfinite().all():
        _refuse(name, "has codes or scales that are no numbers")
    return _in_16_bits(model, module, name, parameter, coding, codes, _bytes(scales.float()))


def _in_16_bits(
    model: torch.nn.Module, module: Any, name: str, parameter: Any, coding: Coding, codes: torch.Tensor, scales: Any
) -> TakenWeight:
    """Return the weight of a layer that quantised its inputs, too, in the dtype that `model` computes in."""
    shape, dtype = tuple(parameter.shape), _usual_dtype(model)
    found = TakenWeight(name, module, parameter, shape, dtype, coding, codes, scales)
    found.forward, found.quantises_inputs = _linear, True
    return _checked(found)


def _usual_dtype(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype of 16 bits that `model` computes in: of its configuration, or of most of its parameters."""
    configured = getattr(getattr(model, "config", None), "dtype", None)
    if configured in _HALVES:
        return configured  # type: ignore[no-any-return]
    found = Counter(parameter.dtype for parameter in model.parameters() if parameter.dtype in _HALVES)
    return found.most_common(1)[0][0] if found else torch.bfloat16


def _linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute as `torch.nn.Linear` in the dtype of `x`."""
    bias = module.bias
    return functional.linear(x, module.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _linear_of_4bit(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute as `Linear4bit` does with decoded values: in its compute dtype."""
    if not module.compute_type_is_set:
        module.set_compute_type(x)
        module.compute_type_is_set = True
    return _linear(module, x if module.compute_dtype is None else x.to(module.compute_dtype)).to(x.dtype)
