"""Chooses which frozen weights are kept as codes, and in which format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from hetmem.errors import ManageError
from hetmem.memory.interrupts import HELD_BACK
from hetmem.schedule.formats import FORMATS, MX_BLOCK, Coding

Format = Literal["nf4", "nf4-nested", "mxfp4", "fp8", "int8"]
"""A format of quantised weights."""

Frozen = Format | Mapping[str, Format | None]
"""What users may give as `frozen=`: the format of all weights that can have one, or of those whose names match a
pattern (the first that does; None: as they are)."""

LEAST_ELEMENTS = 4096
"""Smaller weights stay as they are."""

_ENCODED = (torch.float32, torch.bfloat16, torch.float16)
_AT_ONCE = 1 << 24


def choose_codings(
    module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], frozen: Frozen | None
) -> dict[str, Coding]:
    """Return the codings of the weights that `frozen` selects among `parameters`, by name. Only those can be selected
    that do not require gradients and have two dimensions or more, and `LEAST_ELEMENTS`. Raises `ManageError` for an
    unknown format, and for a pattern, or a format, that selects nothing."""
    if frozen is None:
        return {}
    patterns = {"*": frozen} if isinstance(frozen, str) else frozen
    _refuse(patterns, frozen)
    possible = {name: p for name, p in parameters.items() if _can_be_coded(p)}
    skipped = _tables(module) if isinstance(frozen, str) else set()
    found: dict[str, Coding] = {}
    turned = _multiplied_along_rows(module)
    selected = {
        at for at, format_ in patterns.items() if format_ is None and any(fnmatchcase(n, at) for n in parameters)
    }
    for name, parameter in possible.items():
        pattern = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        if pattern is None or id(parameter) in skipped:
            continue
        selected.add(pattern)
        if (format_ := patterns[pattern]) is not None:
            in_rows = format_ == "mxfp4" and id(parameter) in turned and parameter.shape[-2] % MX_BLOCK == 0
            found[name] = Coding.of("mxfp4-transposed" if in_rows else format_, parameter.shape)
    for pattern in patterns:
        if pattern not in selected:
            what = f"frozen={frozen!r}" if isinstance(frozen, str) else f"the pattern {pattern!r} of frozen="
            raise ManageError(
                f"{what} selects no weight that can be quantised: one has requires_grad=False (set it before "
                f"hetmem.manage: p.requires_grad_(False)), two dimensions or more, {LEAST_ELEMENTS} elements or more, "
                f"and a dtype of float32, bfloat16 or float16{_of_tables(possible, skipped)}"
            )
    return found


def _refuse(patterns: Any, frozen: Any) -> None:
    """Raise `ManageError` for what is no `Frozen`."""
    if not isinstance(patterns, Mapping) or not patterns or not all(isinstance(name, str) for name in patterns):
        raise ManageError(
            f"frozen must be one of {', '.join(map(repr, FORMATS))}, or a mapping from patterns of parameter names to "
            f"these, got {frozen!r}"
        )
    for pattern, format_ in patterns.items():
        if format_ not in FORMATS and not (format_ is None and not isinstance(frozen, str)):
            of = "frozen" if isinstance(frozen, str) else f"frozen[{pattern!r}]"
            raise ManageError(f"{of} must be one of {', '.join(map(repr, FORMATS))}, got {format_!r}")


def _can_be_coded(parameter: torch.nn.Parameter) -> bool:
    wide = parameter.dim() >= 2 and parameter.numel() >= LEAST_ELEMENTS
    return wide and not parameter.requires_grad and parameter.dtype in _ENCODED


def _multiplied_along_rows(module: torch.nn.Module) -> set[int]:
    """Return the `id`s of stacked experts that transformers multiplies along their last dimension but one, as those of
    gpt-oss, whose files have blocks along that."""
    stacked = (part for part in module.modules() if getattr(part, "is_transposed", False) is True)
    return {id(each) for part in stacked for each in part.parameters(recurse=False) if each.dim() == 3}


def _tables(module: torch.nn.Module) -> set[int]:
    """Return the `id`s of the weights of embeddings and of output embeddings, which lose most by quantisation."""
    found: set[int] = set()
    for part in _embeddings(module):
        found.update(id(parameter) for parameter in part.parameters())
    return found


def _embeddings(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for part in module.modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            yield part
        output: Any = getattr(part, "get_output_embeddings", None)
        head = output() if callable(output) else None
        if isinstance(head, torch.nn.Module):
            yield head


def _of_tables(possible: Mapping[str, torch.nn.Parameter], skipped: set[int]) -> str:
    left = [name for name, parameter in possible.items() if id(parameter) in skipped]
    return f"; {', '.join(left)} can be selected by a mapping only, as embeddings" if left else ""


def refuse_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Raise `ManageError` if `parameter`, which is on `meta`, is trained, or if `module` has buffers there: neither is
    loaded from files of a base."""
    if parameter.requires_grad:
        raise ManageError(
            f"{name} is on meta, without values, and trained: give it memory and initialise it before hetmem.manage "
            f"(part.to_empty(device='cpu'), then its reset_parameters()). Frozen weights may stay on meta until "
            f"hetmem.load_weights"
        )
    for other, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ManageError(
                f"the buffer {other} is on meta, without values: build the model with its parameters alone on meta, as "
                f"accelerate.init_empty_weights() does"
            )


def refuse_infinite(parameters: Mapping[str, torch.nn.Parameter], codings: Mapping[str, Coding]) -> None:
    """Raise `ManageError` for an infinity or NaN in a weight that is to be encoded, before anything is changed."""
    for name in (name for name in codings if not parameters[name].is_meta):
        HELD_BACK.raise_here()
        flat = parameters[name].detach().reshape(-1)
        if not all(bool(flat[at : at + _AT_ONCE].isfinite().all()) for at in range(0, flat.numel(), _AT_ONCE)):
            raise ManageError(
                f"{name} has an infinity or NaN, for which {codings[name].format} has no code: look for its cause, or "
                f"leave the weight out of frozen=… (a mapping of name patterns)"
            )
