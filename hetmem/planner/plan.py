"""The answer to "does it fit, and how fast will it be": a `Plan`, as numbers, text and a file."""

from __future__ import annotations

import hashlib
import html
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from hetmem.base.config import Budget
from hetmem.base.whole_files import write_whole
from hetmem.errors import BudgetError, HetmemError
from hetmem.planner.plan_text import Figures, line, text

OPTIONS: dict[str, tuple[str | bool, ...]] = {
    "overlap": ("off", "backward", "forward"),
    "gradients": ("visible", "streamed"),
    "moments": ("float32", "bfloat16", "8bit"),
    "stochastic_rounding": (False, True),
}
"""What a plan knows of `hetmem.AdamW`; the first of each is the default."""

PLAN_VERSION = 9
_WIDTH = 76
KEPT = "kept for homes on the device"
"""The role of places that homes have left, and go back to when the device needs its memory."""


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
    `device_update_share`: the part of the parameters that is updated on the device, where it lives.
    `optimizer`: the options that `hetmem.AdamW` is to be made with, beside torch's; those not named are the default
    ones. `alternatives`: the same training done differently, where that fits: `advice`, `micro_batches`, `step_seconds`
    and `activation_bytes` of each, the fastest first. `approximations`: the same of what changes the mathematics.
    `combined`: the plan, as of `to_dict`, with all done that is faster together and has the same bits; None if this one
    is that. `activations` is as for `manage`; `activation_choices`: for other than "keep", what each choice comes to,
    `step_seconds` (None if it does not fit), `moved_bytes`, those of them on NVMe (`nvme_bytes`), `kept_bytes`, how
    many `times` as large a batch or sequence fits, and that as `rows` of this sequence or a `sequence` of these rows.
    `layers`: where other than `activations` alone is planned for the `count` repeated layers `of` the model, how many
    of the first are checkpointed (`recomputed`), and `moved_bytes` and `kept_bytes` of what is saved then; else None.
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
        budget = self.budget_bytes
        if budget["nvme"] and not self.nvme_directories:
            raise BudgetError("the plan uses NVMe: say where with plan.with_nvme('/path/on/the/drive')")
        nvme = budget["nvme"] or None
        return Budget(
            budget["device"],
            budget["host"],
            nvme,
            list(self.nvme_directories) if nvme else None,
            device_chunks=self.device_chunks,
            home_copies=self.home_copies,
        )

    @property
    def best(self) -> Plan:
        """The plan that `code` is of: `combined`, or this one."""
        return self if self.combined is None else Plan.from_dict(self.combined)

    @property
    def keywords(self) -> tuple[str, ...]:
        """What `manage` and `managed` are to be given so that a run does as planned, as Python."""
        said = {
            "mixed_precision": f"torch.{self.mixed_precision}" if self.mixed_precision else None,
            "chunk_bytes": None if self.chunk_bytes is None else _size(self.chunk_bytes),
            "activations": None if self.activations == "keep" else json.dumps(self.activations),
        }
        return self._budget_as_written(), *(f"{name}={value}" for name, value in said.items() if value is not None)

    @property
    def constructor(self) -> str:
        """How to make the optimizer so that a run does as planned, as Python."""
        return f"optimizer = hetmem.AdamW({', '.join(self._options())})"

    def _options(self) -> tuple[str, ...]:
        written = {"bfloat16": "torch.bfloat16"}
        options = (f"{name}={written.get(value) or _python(value)}" for name, value in self.optimizer.items())
        return "model.parameters()", *options

    def code(self) -> str:
        """All that a program is to say so that it runs as planned, in lines of at most 80 columns where that can be."""
        arguments = [f"    {argument}," for argument in self.keywords]
        lines = [*self.setup]
        if self.inference or self.setup:
            whole = "model.eval().requires_grad_(False)" if self.inference else "model"
            lines += ["model = hetmem.manage(", f"    {whole},", *arguments, ")"]
        else:
            lines += ["@hetmem.managed(", *arguments, ")", f"class {self.model}({self.model}):", "    pass", ""]
            lines += [f"model = {self.model}(...)  # what it takes"]
        if self.layers and self.layers["recomputed"]:
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

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, with a version, and a digest of all of that."""
        data = {"version": PLAN_VERSION, **json.loads(json.dumps(asdict(self)))}
        return {**data, "digest": _digest(data)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON. The file appears whole or not at all; raises OSError with the old one as it
        was."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan that `save` wrote. Raises `PlanError` for anything else, also for one that was changed since."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{os.fspath(path)} is no plan: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan that `to_dict` gave. Raises `PlanError` for anything else."""
        given = dict(data) if isinstance(data, Mapping) else {"version": data}
        if given.get("version") != PLAN_VERSION:
            raise PlanError(
                f"plan: version: expected {PLAN_VERSION}, got {given.get('version')!r}: another hetmem made it; plan "
                f"again with this one"
            )
        if given.pop("digest", None) != _digest(given):
            raise PlanError(
                "plan: digest: it was changed since hetmem made it: plan again, or give manage the keywords that the "
                "plan says, with other values, in its place"
            )
        kinds = {name: get_origin(kind) or kind for name, kind in get_type_hints(cls).items()}
        return cls(**{name: tuple(given[name]) if kind is tuple else given[name] for name, kind in kinds.items()})

    def __str__(self) -> str:
        """The whole of it, one figure a line."""
        return text(self, self.best, self.best.code())

    def __repr__(self) -> str:
        return line(self)

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return f"<pre>{html.escape(str(self))}</pre>"


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _size(nbytes: int) -> str:
    """As one writes it in Python."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes and nbytes % size == 0:
            return f'"{nbytes // size}{unit}"'
    return str(nbytes)


def _python(value: str | bool) -> str:
    return str(value) if isinstance(value, bool) else json.dumps(value)
