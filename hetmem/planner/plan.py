"""The answer to "does it fit, and how fast will it be": a `Plan`, as numbers, a file, and text of at most 80 columns.

The text says whether it fits, which resource binds, what to change, and has a block of code to paste.
"""

from __future__ import annotations

import html
import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hetmem.base.config import Budget
from hetmem.base.json_files import read_json
from hetmem.base.schema import SchemaError, shown
from hetmem.base.units import format_seconds, format_size
from hetmem.base.whole_files import write_whole
from hetmem.errors import BudgetError, HetmemError, printable
from hetmem.planner.plan_shape import RESOURCES, TIERS, check_plan, digest_of
from hetmem.planner.wording import (
    LOGITS_SHARE,
    TIMES,
    as_source,
    between_line,
    cache_line,
    choice_line,
    drive_life,
    drive_line,
    generation_lines,
    logits_line,
    other_order_line,
    speed,
)
from hetmem.planner.wording import count as _count
from hetmem.planner.wording import wrapped as _wrapped

PLAN_VERSION = 16
KEPT = "kept for homes on the device"
LOANED = "gradients until their update"
"""The role of memory that homes moved to the device have left, reserved for their way back."""
MARGIN_SHARE = 0.05
"""The margin of a run's budget above the planned peak of a tier."""
_DIRECTORY = "/path/on/the/drive"
_CODE_WIDTH = 76
_SHOWN = 4
"""How many kinds of tensors at the peak the text names."""
_MOST_BYTES = 4 << 20
"""The most that the file of a plan may have."""


class PlanError(HetmemError, ValueError):
    """A model cannot be planned, or a plan cannot be read; the message says why and what to do."""


@dataclass(frozen=True, repr=False)
class Plan:
    """The predicted run of a managed model. Bytes and seconds; keys of dicts name tiers, roles and resources.

    `fits`: whether the run stays within the budget. `peak_bytes[tier]`, `role_bytes[tier][role]`: the peak of each tier
    (`activations` are everything on the device that is not chunks). `terms`: the busy seconds of each resource in
    a step; `binding` names the largest; `step_seconds` is the simulated time of a step (None if it does not fit).
    `flops` of matrix operators in a step, of which `recomputed_flops` by checkpoints.
    `compute_bound_rows`: about the batch from which on compute binds, whether or not it fits; where micro-batches
    `accumulate`, `compute_bound_micro_batches`: so many of this one, None if compute would bind with no number of them.
    `accumulate`: whether the micro-batches pass the model layer by layer, as `hetmem.accumulate` has them do.
    `other_order`: of a step of several, `step_seconds` (None if it does not fit), `device_peak_bytes` and `link_bytes`
    of the loop, or, of a plan of the loop, of `hetmem.accumulate`; else None.
    `budget_bytes[tier]`: the budget for the run, the peak and a margin of `MARGIN_SHARE` (on the device a little more,
    which is never filled); where it does not fit, the `capacity_bytes` that it was planned within.
    `at_peak`: the largest kinds of tensors on the device beside chunks at their peak, in `peak_operator`: `what` and
    the `bytes` of each kind; `logits_bytes`: the bytes of those as wide as the vocabulary.
    `missing_bytes[tier]`: bytes to add so that it fits. `mixed_precision` is the dtype that was asked for, by name, or
    None; `checkpointing`: whether every repeated layer is planned as checkpointed, which the model has to do itself.
    `frozen` is what `manage` was to quantise, or None.
    `chunk_bytes`, `device_chunks` and `home_copies` are what `manage(plan=…)` sets; None where the default is as good.
    `device_update_share`: the share of the trained parameters that is updated on the device.
    `optimizer`: the options to pass to `hetmem.AdamW` beside torch's; those not named keep their defaults.
    `approximations`: changes of the mathematics that are faster, or fit where this plan does not: `advice` and
    `step_seconds` of each, the fastest first. `advice`: changes that make it fit, the cheapest first.
    `changes`: options and changes of the program, all with the same bits, that this plan needs beyond what was asked
    for, as that does not fit or needs a drive (`as_asked` says which).
    `combined`: the plan, as of `to_dict`, with the fastest combination of changes that keep the bits; None if this one
    is that. `activations` is as for `manage`; `activation_choices`: for other than "keep", for each choice
    `step_seconds` (None if it does not fit), `moved_bytes`, those of them on NVMe (`nvme_bytes`), `kept_bytes`, how
    many `times` as large a batch or sequence fits, and that as `rows` of this sequence or a `sequence` of these rows.
    `layers`: if some of the `count` repeated layers `of` the model are to be checkpointed, how many of the first
    (`recomputed`), and the `moved_bytes` and `kept_bytes` of activations then; else None.
    `inference`: forwards alone. `generation`: of a plan for new tokens after a prompt, whose step is all of it, else
    None: docs/schemas.md has its keys. `between_steps`: bytes and seconds of a checkpoint at the drive's rate, and
    whether it hides behind a step; those of parking and waking; None for inference. `loss`: "chunked" for that of
    `hetmem.chunked_loss`, else None. `setup`: code that comes before the model is managed.
    """

    model: str
    hardware: str
    parameters: int
    rows: int
    tokens: int
    micro_batches: int
    accumulate: bool
    other_order: dict[str, Any] | None
    checkpointing: bool
    mixed_precision: str | None
    frozen: str | dict[str, str | None] | None
    fits: bool
    capacity_bytes: dict[str, int]
    budget_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    role_bytes: dict[str, dict[str, int]]
    step_seconds: float | None
    stall_seconds: float | None
    terms: dict[str, float]
    binding: str | None
    link_bytes: dict[str, int]
    flops: int
    recomputed_flops: int
    activations: str
    activation_bytes: dict[str, int]
    activation_choices: tuple[dict[str, Any], ...]
    layers: dict[str, Any] | None
    chunk_waste: float
    slot_bytes: int
    chunk_bytes: int | None
    device_chunks: int | None
    home_copies: bool | None
    device_update_share: float
    optimizer: dict[str, Any]
    approximations: tuple[dict[str, Any], ...]
    changes: tuple[str, ...]
    as_asked: str
    combined: dict[str, Any] | None
    inference: bool
    generation: dict[str, Any] | None
    between_steps: dict[str, Any] | None
    loss: str | None
    setup: tuple[str, ...]
    at_peak: tuple[dict[str, Any], ...]
    peak_operator: str
    logits_bytes: int
    compute_bound_rows: int | None
    compute_bound_micro_batches: int | None
    largest_parameters: int
    missing_bytes: dict[str, int]
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    nvme_directories: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens (or rows) of a step divided by its seconds."""
        return self.tokens * self.micro_batches / self.step_seconds if self.step_seconds else None

    @property
    def overlap(self) -> float | None:
        """The largest term divided by the step's seconds: 1 if everything else is hidden behind it."""
        return max(self.terms.values()) / self.step_seconds if self.step_seconds else None

    @property
    def budget(self) -> Budget:
        """The budget to run with. Raises `BudgetError` if the plan uses NVMe and names no directory."""
        if self.budget_bytes["nvme"] and not self.nvme_directories:
            raise BudgetError(f"the plan uses NVMe: say where with plan.with_nvme('{_DIRECTORY}')")
        return Budget(**self._limits())

    def _limits(self) -> dict[str, Any]:
        """Return the arguments of the budget that are not the default ones."""
        chosen: dict[str, Any] = {**self.budget_bytes, "nvme": self.budget_bytes["nvme"] or None}
        chosen |= {"nvme_dir": [*self.nvme_directories] or [_DIRECTORY]} if chosen["nvme"] else {}
        chosen |= {"device_chunks": self.device_chunks, "home_copies": self.home_copies}
        return {name: value for name, value in chosen.items() if value is not None}

    @property
    def best(self) -> Plan:
        """The fastest plan with the same bits: `combined`, or this one."""
        return self if self.combined is None else Plan.from_dict(self.combined)

    @property
    def keywords(self) -> tuple[str, ...]:
        """The arguments of `manage` and `managed` for a run as planned, as Python source."""
        limits = (f"{name}={as_source(value)}" for name, value in self._limits().items())
        written = {
            "mixed_precision": f"torch.{self.mixed_precision}" if self.mixed_precision else None,
            "frozen": self.frozen and (json.dumps(self.frozen) if isinstance(self.frozen, str) else repr(self.frozen)),
            "chunk_bytes": None if self.chunk_bytes is None else as_source(self.chunk_bytes),
            "activations": None if self.activations == "keep" else json.dumps(self.activations),
        }
        options = (f"{name}={value}" for name, value in written.items() if value is not None)
        return f"hetmem.Budget({', '.join(limits)})", *options

    @property
    def constructor(self) -> str:
        """The line that makes the optimizer for a run as planned, as Python source."""
        return f"optimizer = hetmem.AdamW({', '.join(self._options())})"

    def _options(self) -> tuple[str, ...]:
        written = {"bfloat16": "torch.bfloat16"}
        options = (f"{name}={written.get(value) or as_source(value)}" for name, value in self.optimizer.items())
        return "model.parameters()", *options

    def code(self) -> str:
        """Return the lines of a program that runs as planned, of at most 80 columns where possible."""
        arguments = [f"    {argument}," for argument in self.keywords]
        lines = [*self.setup]
        if self.inference or self.setup or self.frozen is not None:  # a class would be built in 16 bits
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
        if not self.inference and len(self.constructor) < _CODE_WIDTH:
            lines.append(self.constructor)
        elif not self.inference:
            lines += ["optimizer = hetmem.AdamW(", *(f"    {option}," for option in self._options()), ")"]
        lines += ["loss_of = hetmem.chunked_loss(model)  # loss_of(**batch).backward()"] if self.loss else []
        if self.accumulate:
            of = f"lambda model, batch: loss_of(**batch) / {self.micro_batches}" if self.loss else ""
            call = f"losses = hetmem.accumulate(model, batches{f', {of}' if of else ''})"
            lines += [f"# a list of {self.micro_batches} batches, whose mean loss is differentiated:", call]
        return "\n".join(lines)

    @property
    def prediction(self) -> dict[str, Any]:
        """The figures that the report of a run by this plan shows beside measured ones: machine and batch, the seconds
        of a step and of each term by the report's names, and the peak of each tier in bytes."""
        names = {"update": "host_optimizer"}
        terms = {names.get(name, name): seconds for name, seconds in self.terms.items() if name != "decode"}
        return {
            "hardware": self.hardware,
            "rows": self.rows,
            "micro_batches": self.micro_batches,
            "step_seconds": self.step_seconds,
            "terms": terms,
            "peak_bytes": dict(self.peak_bytes),
        }

    def with_nvme(self, *nvme_directories: str | os.PathLike[str]) -> Plan:
        """Return this plan with its files in `nvme_directories`: a plan knows no directories of other machines."""
        return replace(self, nvme_directories=tuple(os.fspath(path) for path in nvme_directories))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers, lists and dicts, with a version and a digest of the rest."""
        data = {"version": PLAN_VERSION, **json.loads(json.dumps(asdict(self)))}
        return {**data, "digest": digest_of(data)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON. The file appears whole or not at all; raises OSError with the old one as it
        was."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote. Raises `PlanError` for anything else, also for one that was edited since."""
        try:
            data = read_json(path, _MOST_BYTES)
        except ValueError as error:
            raise PlanError(f"{os.fspath(path)} is no plan: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Return the plan that `to_dict` gave. Raises `PlanError` for anything else, with the key that is wrong."""
        plan = cls._of(data, "plan")
        if plan.combined is not None and cls._of(plan.combined, "plan: combined").combined is not None:
            raise PlanError("plan: combined.combined: expected null, as a combination is the best one already")
        return plan

    @classmethod
    def _of(cls, data: Any, what: str) -> Plan:
        """Return the plan of `data`, whose `combined` is not checked. Raises `PlanError`."""
        given: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"version": data}
        if given.get("version") != PLAN_VERSION:
            raise PlanError(
                f"{what}: version: expected {PLAN_VERSION}, got {shown(given.get('version'))}: another hetmem made it; "
                f"plan again with this one"
            )
        if given.pop("digest", None) != digest_of(given):
            raise PlanError(
                f"{what}: digest: it was changed since hetmem made it: plan again, or give manage the keywords that "
                f"the plan says, with other values, in its place"
            )
        del given["version"]
        try:
            check_plan(given)
        except SchemaError as error:
            raise PlanError(f"{what}: {error}: plan again with this hetmem") from error
        made: dict[str, Any] = {name: tuple(each) if type(each) is list else each for name, each in given.items()}
        return cls(**made)

    def __str__(self) -> str:
        """Return the plan as text, with advice and a block of code to paste."""
        parts = [*_head(self), "", *_tiers(self), "", *(_time(self) if self.fits else _refusal(self))]
        return printable("\n".join([*parts, *_choices(self), *_block(self, self.best)]))

    def __repr__(self) -> str:
        """Return one line: the seconds of a step, what binds and the peaks; or the missing bytes."""
        if not self.fits or self.step_seconds is None or self.binding is None:
            missing = ", ".join(
                f"{tier} {format_size(nbytes)}" for tier, nbytes in self.missing_bytes.items() if nbytes
            )
            return printable(f"<Plan of {self.model}: does not fit; missing: {missing or 'see str()'}>")
        peaks = ", ".join(f"{tier} {format_size(nbytes)}" for tier, nbytes in self.peak_bytes.items() if nbytes)
        binds = RESOURCES.get(self.binding, self.binding)
        speed = f"{format_seconds(self.step_seconds)} a step, {binds} binds"
        return printable(f"<Plan of {self.model}: {speed}; peak: {peaks}>")

    def _repr_html_(self) -> str:
        """Return the text of the plan for a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"


# ---- as text -----------------------------------------------------------------------------------------------------


def _head(plan: Plan) -> Iterator[str]:
    precision = "16-bit compute" if plan.mixed_precision else "as its weights are"
    if plan.frozen is not None:
        precision += f", frozen weights in {plan.frozen if isinstance(plan.frozen, str) else 'the given formats'}"
    kind = "rows" if plan.tokens == plan.rows else "tokens"
    size, batch = f"{_count(plan.parameters)} parameters", f"{plan.tokens} {kind} a batch"
    if plan.micro_batches > 1:
        batch = f"{plan.micro_batches} micro-batches of {plan.tokens} {kind} a step"
    batch += ", layer by layer" if plan.accumulate else ""
    batch += ", every layer checkpointed" if plan.checkpointing else ""
    batch += ", inference" if plan.inference else ""
    if plan.generation is not None:
        batch = f"{plan.rows} rows of {plan.generation['prompt']} tokens, {plan.generation['new_tokens']} new ones each"
    yield _wrapped(f"{plan.model}: {size}, {precision}, {batch}, {plan.hardware}")
    if not plan.changes:
        yield "fits" if plan.fits else "DOES NOT FIT"
        return
    yield _wrapped(f"fits, with the same bits, with {' and '.join(plan.changes)}")
    yield _wrapped(f"as asked, {plan.as_asked}")
    if _consumes(plan):
        yield _wrapped(_MUST_NOT)


def _consumes(plan: Plan) -> bool:
    """Return whether updates consume gradients within the backward."""
    return "overlap" in plan.optimizer


_MUST_NOT = (
    "then updates consume gradients within the backward: the program must not call clip_grad_norm_ or read p.grad"
)


def _tiers(plan: Plan) -> Iterator[str]:
    yield f"{'tier':7}{'peak':>11}{'budget':>12}   of which"
    for tier in TIERS:
        sizes = plan.role_bytes[tier].items()
        roles = ", ".join(f"{role} {format_size(nbytes)}" for role, nbytes in sizes if nbytes)
        if sum(nbytes for _, nbytes in sizes) > plan.peak_bytes[tier]:
            roles += " (the most of each, at different moments)"
        peak, budget = format_size(plan.peak_bytes[tier]), format_size(plan.budget_bytes[tier])
        yield _wrapped(f"{tier:7}{peak:>11} {budget:>11}   {roles}".rstrip(), " " * 33)
    if plan.fits:
        limits = ", ".join(f"{tier} {format_size(plan.capacity_bytes[tier])}" for tier in TIERS)
        margin = f"{MARGIN_SHARE:.0%} more, on the device what must stay free too"
        back = ""
        if plan.budget_bytes["host"] and not plan.peak_bytes["host"]:
            back = "; host memory is for the model to move to if a later batch needs the device"
        yield _wrapped(f"budget: the peak and {margin}{back}; planned within {limits}")
    if plan.generation is not None:
        yield cache_line(plan.generation)
    others = [f"{how} {format_size(nbytes)}" for how, nbytes in plan.activation_bytes.items()]
    yield _wrapped(f"activations: {', '.join(others)}")
    for each in plan.activation_choices:
        yield choice_line(each, plan.tokens > plan.rows)
    largest = ", ".join(f"{each['what']} {format_size(each['bytes'])}" for each in plan.at_peak[:_SHOWN])
    if largest:
        yield _wrapped(f"most at {plan.peak_operator}: {largest}")
    leads = plan.logits_bytes > LOGITS_SHARE * max(plan.activation_bytes.values(), default=0)
    if leads and not plan.inference and plan.loss is None:
        yield logits_line(plan.model, plan.logits_bytes)


def _time(plan: Plan) -> Iterator[str]:
    seconds = plan.step_seconds
    assert seconds is not None
    kind = "rows" if plan.tokens == plan.rows else "tokens"
    rates = f"{plan.tokens_per_second:.1f} {kind}/s, {speed(plan.flops, plan.recomputed_flops, seconds)}"
    what = "step" if plan.generation is None else "generation"
    yield _wrapped(f"{what}: {format_seconds(seconds)}, {rates}; overlap {plan.overlap:.2f}")
    if not plan.inference:
        yield TIMES
    if plan.generation is not None:
        yield from generation_lines(plan.generation)
    for name, busy in plan.terms.items():
        mark = "  <- binds" if name == plan.binding else ""
        yield f"  {RESOURCES.get(name, name):22}{format_seconds(busy):>12}{mark}"
    yield f"chunks: {format_size(plan.slot_bytes)} at home, {plan.chunk_waste:.1%} unused"
    if not plan.inference:
        share = plan.device_update_share
        yield _wrapped(
            f"optimizer: {share:.0%} of the parameters are updated on the device, {1 - share:.0%} by the host"
        )
    if plan.link_bytes.get("nvme_write"):
        yield drive_line(plan.link_bytes["nvme_write"], seconds, plan.capacity_bytes["nvme"])
    if plan.between_steps is not None:
        yield between_line(plan.between_steps)
    if plan.other_order is not None:
        yield other_order_line(plan.other_order, seconds, accumulates=plan.accumulate)
    if plan.compute_bound_micro_batches is not None:
        yield f"compute binds from m = {plan.compute_bound_micro_batches} micro-batches on (now {plan.micro_batches})"
    elif plan.compute_bound_rows is not None:
        yield f"compute binds from a batch of about {plan.compute_bound_rows} (now {plan.rows})"
    yield f"the largest model of this shape would have about {_count(plan.largest_parameters)} parameters"


def _refusal(plan: Plan) -> Iterator[str]:
    missing = " and ".join(f"{format_size(nbytes)} on {tier}" for tier, nbytes in plan.missing_bytes.items())
    yield f"missing: {missing}"
    yield from (_wrapped(f"because {reason}") for reason in plan.reasons)
    yield from (_wrapped(f"{'cheapest' if at == 0 else 'or'}: {advice}") for at, advice in enumerate(plan.advice))
    if plan.largest_parameters < plan.parameters:
        yield f"what fits has about {_count(plan.largest_parameters)} parameters of this shape"


def _choices(plan: Plan) -> Iterator[str]:
    """Yield the `approximations`: they change the mathematics, so the user has to choose them."""
    if plan.approximations:
        yield "changes the mathematics:"
    for other in plan.approximations:
        yield _wrapped(f"  {other['advice']}: {format_seconds(other['step_seconds'])} a step", "    ")


def _block(plan: Plan, best: Plan) -> Iterator[str]:
    if not best.fits:
        return
    how = f"{format_seconds(best.step_seconds or 0.0)} a {'step' if best.generation is None else 'generation'}"
    if plan.combined is not None and best.link_bytes.get("nvme_write"):
        written, capacity = best.link_bytes["nvme_write"], best.capacity_bytes["nvme"]
        how += f", a drive lasts {drive_life(written, best.step_seconds or 1.0, capacity)[1]}"
    if plan.combined is not None:
        peaks = ", ".join(f"{tier} {format_size(best.peak_bytes[tier])}" for tier in TIERS if best.peak_bytes[tier])
        how += f", all with the same bits; peaks {peaks}"
    yield ""
    if best.layers is not None:
        layers = best.layers
        which = f"checkpoint the first {layers['recomputed']} of the {layers['count']} layers"
        moved, kept = format_size(layers["moved_bytes"]), format_size(layers["kept_bytes"])
        yield _wrapped(f"by layer: {which}; of what autograd saves then {moved} move and {kept} stay")
    if _consumes(best) and not _consumes(plan):
        yield _wrapped(_MUST_NOT)
    yield _wrapped(f"paste ({how}):")
    yield textwrap.indent(best.code(), "    ")
