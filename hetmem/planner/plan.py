"""The answer to "does it fit, and how fast will it be": a `Plan`, as numbers, text and a file.

Checks every field of a file before a run or a reader relies on it.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hetmem.base.config import Budget
from hetmem.base.whole_files import write_whole
from hetmem.errors import BudgetError, HetmemError
from hetmem.planner.plan_text import TIERS, Figures, line, text

OPTIONS: dict[str, tuple[str | bool, ...]] = {
    "overlap": ("off", "backward", "forward"),
    "gradients": ("visible", "streamed"),
    "moments": ("float32", "bfloat16", "8bit"),
    "stochastic_rounding": (False, True),
}
"""What a plan knows of `hetmem.AdamW`; the first of each is the default."""

PLAN_VERSION = 8
_WIDTH = 76
_MOST = 1e40
KEPT = "kept for homes on the device"
"""The role of places that homes have left, and go back to when the device needs its memory."""
SENT_STATES = "states sent for their update"
"""The role of the slots on the device that states are brought to."""


class PlanError(HetmemError, ValueError):
    """A model cannot be planned, or a plan cannot be read; the message says why and what to do."""


@dataclass(frozen=True, repr=False)
class Plan(Figures):
    """What a managed run will do. Bytes and seconds; the dicts' keys are the tiers, roles and resources by name.

    `fits`: whether the run stays within the budget. `peak_bytes[tier]`, `role_bytes[tier][role]`: the most each tier
    holds (`activations` are everything on the device that is not chunks). `terms`: the busy seconds of each resource in
    a step; `binding` is the largest of them, and `step_seconds` is what the simulator reaches (None if it does not
    fit). `compute_bound_rows`: about the batch from which on compute binds, whether or not it fits.
    `budget_bytes[tier]`: what a run is to be given, the peak and a margin of `MARGIN_SHARE` (on the device a little
    more, which is never filled); of what does not fit, the `capacity_bytes` that it was planned within. `at_peak`: the
    largest of what is on the device beside chunks when that is most, at `peak_operator`: `what` and the `bytes` of all
    such tensors; `logits_bytes`, those of them that are as wide as the vocabulary. `missing_bytes[tier]`: what would
    make it fit. `mixed_precision` is what was asked for, the name of a dtype or None,
    and so is `checkpointing` of every repeated layer, which the model has to do by itself. `chunk_bytes`,
    `device_chunks` and `home_copies` are what `manage(plan=…)` sets; None where the default is as good.
    `device_update_share`: the part of the parameters that is updated on the device, where it lives;
    `streamed_update_share`: that whose states are sent there for it. `streaming`: how that compares, whichever was
    taken: the `share` that would be sent, `step_seconds` with it and `host_step_seconds` without; None where nothing
    would be sent. `profile`: where states are sent, what the run has to know of the machine for it, as of
    `HardwareProfile.to_dict`; `profile_name`: the shipped profile or the file that it came from, None if neither.
    `optimizer`: the options that `hetmem.AdamW` is to be made with, beside torch's; those not named are the default
    ones. `alternatives`: the same training done differently, where that fits: `advice`, `micro_batches`, `step_seconds`
    and `activation_bytes` of each, the fastest first. `approximations`: the same of what changes the mathematics.
    `combined`: the plan, as of `to_dict`, with all done that is faster together and has the same bits; None if this one
    is that. `activations` is as for `manage`; `activation_choices`: for other than "keep", what each choice comes to,
    `step_seconds` (None if it does not fit), `moved_bytes`, those of them on NVMe (`nvme_bytes`), `kept_bytes`, how
    many `times` as large a batch or sequence fits, and that as `rows` of this sequence or a `sequence` of these rows.
    `layers`: where some of the `count` repeated layers `of` the model are planned to be checkpointed, how many of the
    first (`recomputed`), and `moved_bytes` and `kept_bytes` of what is saved then; else None.
    `inference`: forwards alone. `setup`: code that comes before the model is managed.
    """

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens (or rows) of a step by its seconds."""
        return self.tokens * self.micro_batches / self.step_seconds if self.step_seconds else None

    @property
    def overlap(self) -> float | None:
        """The largest term by the step's seconds: 1 if everything else is hidden behind it."""
        return max(self.terms.values()) / self.step_seconds if self.step_seconds else None

    @property
    def budget(self) -> Budget:
        """The budget to run with. Raises `BudgetError` if the plan uses NVMe and names no directory."""
        return self.budget_in(*self.nvme_directories)

    @property
    def best(self) -> Plan:
        """The plan that `code` is of: `combined`, or this one."""
        return self if self.combined is None else Plan.from_dict(self.combined)

    @property
    def needs_its_file(self) -> bool:
        """Whether keywords cannot say it all: the profile is no file."""
        return self.profile is not None and self.profile_name is None

    @property
    def keywords(self) -> tuple[str, ...]:
        """What `manage` and `managed` are to be given so that a run does as planned, as Python."""
        said = {
            "mixed_precision": f"torch.{self.mixed_precision}" if self.mixed_precision else None,
            "chunk_bytes": None if self.chunk_bytes is None else _size(self.chunk_bytes),
            "hardware": json.dumps(self.profile_name) if self.profile is not None and self.profile_name else None,
            "activations": None if self.activations == "keep" else json.dumps(self.activations),
        }
        return self._budget_as_written(), *(f"{name}={value}" for name, value in said.items() if value is not None)

    @property
    def decorator(self) -> str:
        """What to write before a model's class so that its instances run as planned, as Python."""
        return f"@hetmem.managed({', '.join(self.keywords)})"

    @property
    def constructor(self) -> str:
        """How to make the optimizer so that a run does as planned, as Python."""
        return f"optimizer = hetmem.AdamW({', '.join(self._options())})"

    def _options(self) -> tuple[str, ...]:
        written = {"bfloat16": "torch.bfloat16"}
        options = (f"{name}={written.get(value) or _python(value)}" for name, value in self.optimizer.items())
        return "model.parameters()", *options

    def code(self, saved_as: str | None = None) -> str:
        """All that a program is to say so that it runs as planned, in lines of at most 80 columns where that can be.
        `saved_as`: the file of this plan, named in place of `keywords`."""
        given = (f"plan={json.dumps(saved_as)}",) if saved_as else self.keywords
        arguments = [f"    {argument}," for argument in given]
        lines = [*self.setup]
        if self.inference or self.setup:
            whole = "model.eval().requires_grad_(False)" if self.inference else "model"
            lines += ["model = hetmem.manage(", f"    {whole},", *arguments, ")"]
        else:
            lines += ["@hetmem.managed(", *arguments, ")", f"class {self.model}({self.model}):", "    pass", ""]
            lines += [f"model = {self.model}(...)  # what it takes"]
        if self.layers:
            lines += [
                "from functools import partial",
                "from torch.utils.checkpoint import checkpoint",
                f"for layer in ({self.layers['of']})[:{self.layers['recomputed']}]:",
                "    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)",
            ]
        elif self.checkpointing:
            lines += ["model.gradient_checkpointing_enable()  # or: checkpoint every layer"]
        if not self.inference and len(self.constructor) < _WIDTH:
            lines.append(self.constructor)
        elif not self.inference:
            lines += ["optimizer = hetmem.AdamW(", *(f"    {option}," for option in self._options()), ")"]
        return "\n".join(lines)

    def _budget_as_written(self) -> str:
        budget = self.budget_bytes
        said = {"device": _size(budget["device"]), "host": _size(budget["host"])}
        if budget["nvme"]:
            directories = [*self.nvme_directories] or ["/path/on/the/drive"]
            said |= {"nvme": _size(budget["nvme"]), "nvme_dir": json.dumps(directories)}
        if self.device_chunks is not None:
            said["device_chunks"] = _size(self.device_chunks)
        if self.home_copies is not None:
            said["home_copies"] = str(self.home_copies)
        return f"hetmem.Budget({', '.join(f'{name}={value}' for name, value in said.items())})"

    @property
    def prediction(self) -> dict[str, Any]:
        """What the report of a run by this plan shows beside what it measured: the machine and the batch it is for, the
        seconds of a step and of each term by the report's names, and the peak of each tier in bytes."""
        terms = {"host_optimizer" if name == "update" else name: seconds for name, seconds in self.terms.items()}
        return {
            "hardware": self.hardware,
            "rows": self.rows,
            "micro_batches": self.micro_batches,
            "step_seconds": self.step_seconds,
            "terms": terms,
            "peak_bytes": dict(self.peak_bytes),
        }

    def with_nvme(self, *nvme_directories: str | os.PathLike[str]) -> Plan:
        """The same plan, with its files in `nvme_directories`: a plan knows no directories of other machines."""
        return replace(self, nvme_directories=tuple(os.fspath(path) for path in nvme_directories))

    def budget_in(self, *nvme_directories: str | os.PathLike[str]) -> Budget:
        """The budget to run with, NVMe in `nvme_directories`."""
        budget, directories = self.budget_bytes, list(nvme_directories)
        if budget["nvme"] and not directories:
            raise BudgetError("the plan uses NVMe: say where with plan.with_nvme('/path/on/the/drive')")
        nvme = budget["nvme"] or None
        return Budget(
            budget["device"],
            budget["host"],
            nvme,
            directories if nvme else None,
            device_chunks=self.device_chunks,
            home_copies=self.home_copies,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, with a version."""
        return {"version": PLAN_VERSION, **json.loads(json.dumps(asdict(self)))}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON. The file appears whole or not at all; raises OSError with the old one as it
        was."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan that `save` wrote. Raises `PlanError` naming the field that is wrong."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{os.fspath(path)} is no plan: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan that `to_dict` gave."""
        if not isinstance(data, Mapping) or data.get("version") != PLAN_VERSION:
            got = data.get("version") if isinstance(data, Mapping) else data
            raise PlanError(
                f"plan: version: expected {PLAN_VERSION}, got {got!r}: another hetmem made it; plan again with this one"
            )
        kinds = get_type_hints(cls)
        for spec in fields(cls):
            name, kind = spec.name, str(spec.type).replace("None", "null")
            kind += " of numbers that are finite and not below zero" if "int" in kind or "float" in kind else ""
            if name not in data:
                raise PlanError(f"plan: {name} is missing")
            said, is_sound = _RULES.get(name, (kind, bool))
            if not _is(data[name], kinds[name]) or (name in _RULES and not is_sound(data[name])):
                raise PlanError(f"plan: {name}: expected {said}, got {data[name]!r}")
        if data["fits"] and not (data["step_seconds"] and data["terms"] and data["binding"] in data["terms"]):
            raise PlanError("plan: one that fits has step_seconds, terms, and the longest of them as binding")
        if data["combined"] is not None:
            try:
                cls.from_dict(data["combined"])
            except PlanError as error:
                raise PlanError(f"plan: combined: expected a plan or null: {error}") from error
        made: dict[str, Any] = {
            name: tuple(data[name]) if get_origin(kind) is tuple else data[name] for name, kind in kinds.items()
        }
        return cls(**made)

    def __str__(self) -> str:
        return described(self)

    def __repr__(self) -> str:
        return line(self)

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return f"<pre>{html.escape(str(self))}</pre>"


def described(plan: Plan, saved_as: str | None = None) -> str:
    """The whole of `plan`, one figure a line. `saved_as`: the file that the plan of the block to paste is in."""
    best = plan.best
    code = best.code(saved_as if best.needs_its_file else None)
    return text(plan, best, code, is_to_be_saved=best.needs_its_file and saved_as is None)


def _is(value: Any, kind: Any) -> bool:
    """Whether `value` is what JSON has of the annotated `kind`; no number is below zero, NaN or beyond all bounds."""
    of = get_args(kind)
    if get_origin(kind) is UnionType:
        return any(_is(value, each) for each in of)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(each, of[1]) for each in value.values())
    if get_origin(kind) is tuple:
        return isinstance(value, (list, tuple)) and all(_is(each, of[0]) for each in value)
    if kind in (int, float):
        return type(value) in (int, kind) and 0 <= value <= _MOST
    return kind is Any or type(value) is kind


def _each(**kinds: type) -> tuple[str, Callable[[Any], bool]]:
    return f"objects with {', '.join(kinds)}", lambda value: all(
        isinstance(one, dict) and _is(one.get(key), kind) for one in value for key, kind in kinds.items()
    )


_OF_LAYERS = ("count", "recomputed", "moved_bytes", "kept_bytes")


def _with(*keys: str) -> tuple[str, Callable[[Any], bool]]:
    return f"numbers for {', '.join(keys)}", lambda value: value is None or set(value) >= set(keys)


_ALTERNATIVES = _each(advice=str, micro_batches=int, step_seconds=float, activation_bytes=int)
_RULES = {
    "mixed_precision": ("bfloat16, float16 or null", lambda value: value in (None, "bfloat16", "float16")),
    "streaming": _with("share", "step_seconds", "host_step_seconds"),
    "optimizer": (
        "at most " + " and ".join(f"{option} ({' or '.join(map(str, known))})" for option, known in OPTIONS.items()),
        lambda value: all(value[option] in OPTIONS.get(option, ()) for option in value),
    ),
    "at_peak": _each(what=str, bytes=int),
    "activations": ("keep, offload or auto", lambda value: value in ("keep", "offload", "auto")),
    "layers": (
        "of, count, recomputed, moved_bytes and kept_bytes, or null",
        lambda value: (
            value is None or (isinstance(value.get("of"), str) and all(_is(value.get(key), int) for key in _OF_LAYERS))
        ),
    ),
    "activation_choices": _each(choice=str, moved_bytes=int, times=float, rows=int, sequence=int),
    **dict.fromkeys(("alternatives", "approximations"), _ALTERNATIVES),
    **dict.fromkeys(("capacity_bytes", "budget_bytes", "peak_bytes", "role_bytes"), _with(*TIERS)),
}
"""Of a field whose kind does not say it all: what it should be, and whether it is."""


def _size(nbytes: int) -> str:
    """As one writes it in Python."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes and nbytes % size == 0:
            return f'"{nbytes // size}{unit}"'
    return str(nbytes)


def _python(value: str | bool) -> str:
    return str(value) if isinstance(value, bool) else json.dumps(value)
