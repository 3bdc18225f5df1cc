"""Writes a plan as a program that runs: it builds the model, trains it on made-up batches, saves it and reports.

Knows what `hetmem plan` was asked for, and the call that was planned. Runs nothing. Names that come from files are
written as string literals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetmem.base.units import format_seconds
from hetmem.errors import HetmemError
from hetmem.planner import Plan, TracedCall
from hetmem.planner.meta_results import rows_of
from hetmem.planner.model import divided, repeated_layers

MOST_LINES = 30
"""The most lines of code, without empty ones."""
_WIDTH = 120
_STEPS = 10


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Where a model comes from: `config_file` of Hugging Face, or `builder`, a function as MODULE:FUNCTION; and `loss`,
    a function of the output, or None."""

    config_file: str | None
    builder: str | None
    loss: str | None = None

    @property
    def folder(self) -> Path:
        """The directory of the configuration, where weights may lie too."""
        assert self.config_file is not None
        return Path(self.config_file).absolute().parent

    @property
    def has_weights(self) -> bool:
        """Whether weights lie beside the configuration."""
        return self.config_file is not None and any(self.folder.glob("*.safetensors"))


def script(plan: Plan, call: TracedCall, source: ModelOrigin) -> str:
    """Return the program that runs `plan` of `call`, of at most `MOST_LINES` lines that are not empty. Raises
    `HetmemError` for a plan that does not fit, and for one with a drive of which no directory is known."""
    if not plan.fits:
        raise HetmemError("no program is written, as the model does not fit")
    if plan.budget_bytes["nvme"] and not plan.nvme_directories:
        raise HetmemError("the plan uses a drive: say where with --nvme-dir, and the program is written")
    hugging_face = source.config_file is not None
    call = divided(call, rows_of(call.batch, plan.rows) // plan.rows)
    blocks = [
        [*_heading(plan, source)],
        [*_model(plan, source, call)],
        [*_batches(plan, call, hugging_face)],
        [*_loop(plan, call, source)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def use_of(plan: Plan, path: str) -> str:
    """Return how a program uses the `path` of a file with `plan`."""
    if not plan.fits:
        return "it does not fit, so no program can run it"
    optimizer = "" if plan.inference else f", then {plan.constructor}"
    return f"model = hetmem.manage(model, plan={json.dumps(path)}){optimizer}"


def _heading(plan: Plan, source: ModelOrigin) -> Iterator[str]:
    assert plan.step_seconds is not None
    what = "Runs" if plan.inference else "Trains"
    yield json.dumps(f"{what} {plan.model} as planned: {format_seconds(plan.step_seconds)} a step on {plan.hardware}.")
    yield ""
    if any("peft" in line for line in plan.setup):
        yield "import peft"
    yield "import torch"
    if source.config_file is not None:
        yield f"from transformers import AutoConfig, {plan.model}"
        if _in_place(plan) and source.has_weights:
            yield "from transformers.initialization import no_init_weights"
    if plan.layers or (plan.checkpointing and source.builder):
        yield "from torch.utils.checkpoint import checkpoint"
    yield ""
    yield "import hetmem"
    for name in dict.fromkeys(each for each in (source.builder, source.loss) if each and ":" in each):
        module, _, function = name.partition(":")
        yield f"from {module} import {function}"


def _in_place(plan: Plan) -> bool:
    """Return whether the model is built by a class that `hetmem.managed` has decorated."""
    return not (plan.inference or plan.setup)


def _model(plan: Plan, source: ModelOrigin, call: TracedCall) -> Iterator[str]:
    yield 'DEVICE = "cuda" if torch.cuda.is_available() else "cpu"'
    if source.config_file is None:
        assert source.builder is not None
        yield f"model = {source.builder.partition(':')[2]}()"
        yield from plan.setup
        yield from _call("model = hetmem.manage(", [_whole(plan), *plan.keywords])
    elif _in_place(plan):
        folder = json.dumps(str(source.folder))
        yield f"config = AutoConfig.from_pretrained({folder})"
        yield from ["", *_call("@hetmem.managed(", [*plan.keywords])]
        yield from [f"class {plan.model}({plan.model}): ...", "", ""]
        if source.has_weights:
            yield "with no_init_weights():"
            yield f"    model = {plan.model}(config)"
            yield f"hetmem.load_weights({folder}, model)"
        else:
            yield f"model = {plan.model}(config)  # then hetmem.load_weights(directory, model)"
    else:
        folder = json.dumps(str(source.folder))
        yield f"config = AutoConfig.from_pretrained({folder})"
        if source.has_weights:
            yield f"model = {plan.model}.from_pretrained({folder}, dtype={_dtype(call)})"
        else:
            yield f"model = {plan.model}(config).to({_dtype(call)})  # or from_pretrained"
        yield from plan.setup
        yield from _call("model = hetmem.manage(", [_whole(plan), *plan.keywords])
    yield from _checkpoints(plan, source, call)
    if not plan.inference:
        yield plan.constructor.replace("model.parameters()", "model.parameters(), lr=1e-5", 1)
        if source.loss == "chunked":
            yield "loss_of = hetmem.chunked_loss(model)"


def _whole(plan: Plan) -> str:
    return "model.eval().requires_grad_(False)" if plan.inference else "model"


def _dtype(call: TracedCall) -> str:
    return str(torch.float32 if not call.setup else torch.bfloat16)


def _call(begin: str, arguments: list[str]) -> list[str]:
    """Return a call in one line, or in one for each argument if that is too long."""
    line = f"{begin}{', '.join(arguments)})"
    return [line] if len(line) <= _WIDTH else [begin, *(f"    {argument}," for argument in arguments), ")"]


def _checkpoints(plan: Plan, source: ModelOrigin, call: TracedCall) -> Iterator[str]:
    if plan.layers:
        layers = f"({plan.layers['of']})[:{plan.layers['recomputed']}]"
    elif not plan.checkpointing:
        return
    elif source.builder is None:
        enable = "activation_checkpointing_enable"  # its new name since transformers 5
        yield f"model.{enable if _has(plan.model, enable) else 'gradient_checkpointing_enable'}()"
        return
    else:
        layers = repeated_layers(call)[0]
    yield f"for layer in {layers}:"
    yield "    layer.forward = lambda *a, f=layer.forward, **k: checkpoint(f, *a, use_reentrant=False, **k)"


def _has(name: str, method: str) -> bool:
    """Return whether the model class `name` of the installed transformers has `method`."""
    import transformers  # it has just made the call

    return hasattr(getattr(transformers, name, None), method)


def _batches(plan: Plan, call: TracedCall, hugging_face: bool) -> Iterator[str]:
    yield "def batches(count):  # put your data here"
    yield f"    for _ in range(count{f' * {plan.micro_batches}' if plan.micro_batches > 1 else ''}):"
    named, batch = isinstance(call.batch, Mapping), call.batch
    values = batch.items() if named else enumerate(batch if isinstance(batch, (tuple, list)) else (batch,))
    made: dict[str, str] = {}
    parts = []
    for name, value in values:
        expression = _made(name, value, hugging_face)
        if expression not in made:
            made[expression] = str(name) if named else f"input_{name}"
            yield f"        {made[expression]} = {expression}"
        parts.append(f'"{name}": {made[expression]}' if named else f"{made[expression]},")
    yield f"        yield {{{', '.join(parts)}}}" if named else f"        yield ({' '.join(parts)})"


def _made(name: str | int, value: Any, hugging_face: bool) -> str:
    """Return an expression for a tensor like `value`; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = tuple(value.shape)
    if value.is_floating_point():
        return f"torch.randn({shape}, dtype={value.dtype}, device=DEVICE)"
    most = "config.get_text_config().vocab_size" if hugging_face and _is_text(name, value) else "2"
    return f"torch.randint({most}, {shape}, device=DEVICE)"


def _is_text(name: str | int, value: torch.Tensor) -> bool:
    return value.dim() == 2 and name in ("input_ids", "decoder_input_ids", "labels")


def _loop(plan: Plan, call: TracedCall, source: ModelOrigin) -> Iterator[str]:
    called = "model(**batch)" if isinstance(call.batch, Mapping) else "model(*batch)"
    if plan.accumulate:
        yield "def forward(model, batch):"
        yield from _loss(source, called)
        yield f"    return loss / {plan.micro_batches}"
        yield from ["", ""]
        yield f"for at in range({_STEPS}):"
        yield "    losses = hetmem.accumulate(model, batches(1), forward)"
        yield from (f"    optimizer.{name}()" for name in ("step", "zero_grad"))
        yield "    print(at, sum(loss.item() for loss in losses))"
        yield from _END
        return
    yield f"for at, batch in enumerate(batches({_STEPS})):"
    if plan.inference:
        yield "    with torch.no_grad():"
        if plan.generation is not None:
            yield f"        tokens = model.generate(**batch, max_new_tokens={plan.generation['new_tokens']})"
            yield "    print(at, tokens.shape)"
        else:
            yield f"        output = {called}"
            yield "    print(at, type(output).__name__)"
        yield 'hetmem.report(model).save("report.html")'
        return
    yield from _loss(source, called)
    indent = "    "
    if plan.micro_batches > 1:
        yield f"    (loss / {plan.micro_batches}).backward()"
        yield f"    if at % {plan.micro_batches} == {plan.micro_batches - 1}:"
        indent = "        "
    else:
        yield "    loss.backward()"
    yield f"{indent}optimizer.step()"
    yield f"{indent}optimizer.zero_grad()"
    yield f"{indent}print(at, loss.item())"
    yield from _END


_END = ('hetmem.save("checkpoint.safetensors", model, optimizer)', 'hetmem.report(model).save("report.html")')


def _loss(source: ModelOrigin, called: str) -> Iterator[str]:
    """Yield the lines of a function or loop that compute the loss of a batch."""
    if source.loss == "chunked":
        yield f"    loss = loss_of({called.removeprefix('model(')}"
    elif source.loss:
        yield f"    loss = {source.loss.partition(':')[2]}({called})"
    elif source.builder:
        yield f"    output = {called}"
        yield '    loss = getattr(output, "loss", output)'
    else:
        yield f"    loss = {called}.loss"
