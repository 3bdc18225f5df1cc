"""`hetmem plan`: from the words of the command line to a plan, and what is said while it is made.

It looks for files before anything that takes seconds is imported. It computes nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetmem.base.config import Limits
from hetmem.base.units import format_size, parse_size
from hetmem.errors import HetmemError

_RATE = re.compile(r"(.+?)/s", re.IGNORECASE)
_PATIENCE_SECONDS = 2.0
"""After so long a user is told what goes on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `hetmem plan`."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("builder", nargs="?", metavar="MODULE:FUNCTION", help="a function that builds the model")
    model.add_argument("--hf-config", metavar="FILE", help="a Hugging Face config.json; its `architectures` is planned")
    parser.add_argument("--batch", type=int, help="rows of a batch (with --hf-config); default: 1")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence (with --hf-config); default: 2048")
    parser.add_argument(
        "--input",
        action="append",
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="an input of the model, e.g. 4x2048 (int64) or 8x3x224x224:float32; once for each, in order, or by NAME; "
        "with --hf-config in place of the one of that name",
    )
    parser.add_argument("--loss", metavar="MODULE:FUNCTION", help="from the output to a loss, if that has none")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of that rank beside frozen linear layers in bfloat16"
    )
    parser.add_argument("--inference", action="store_true", help="forwards alone, under torch.no_grad()")
    parser.add_argument(
        "--hardware",
        help="a shipped profile (a100, gh200, h100, h200, l4, rtx4090), or a file from `hetmem probe`; default: h100",
    )
    parser.add_argument(
        "--set",
        action="append",
        metavar="FIGURE=VALUE",
        help="change a figure of the profile, e.g. nvme_read.bytes_per_second=12GB; may be repeated",
    )
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="what hetmem may use of the device, e.g. 20GiB; default: all of it"
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="what it may use of the host; default: all of it")
    parser.add_argument("--nvme", metavar="SIZE", default="0", help="what it may use of a drive; default: nothing")
    parser.add_argument(
        "--nvme-dir", metavar="DIR", action="append", help="where, for the saved plan; more than once to take turns"
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        help="what operators compute in; default: bfloat16 with --hf-config, else float32",
    )
    parser.add_argument("--chunk-bytes", metavar="SIZE", help="of a chunk at home; default: searched")
    parser.add_argument("--micro-batches", type=int, default=1, help="forwards and backwards in a step; default: 1")
    parser.add_argument(
        "--checkpointing", action="store_true", help="activations of every repeated layer are computed again"
    )
    parser.add_argument(
        "--activations", default="keep", help="as in hetmem.manage(activations=…): keep, offload or auto"
    )
    parser.add_argument("--overlap", default="off", help="as in hetmem.AdamW(overlap=…): off, backward or forward")
    parser.add_argument("--gradients", default="visible", help="as in hetmem.AdamW(gradients=…): visible or streamed")
    parser.add_argument(
        "--moments",
        default="float32",
        help="as in hetmem.AdamW(moments=…): float32, bfloat16 or 8bit (changes the mathematics)",
    )
    parser.add_argument(
        "--stochastic-rounding",
        action="store_true",
        help="weights in bfloat16, rounded by chance, as in "
        "hetmem.AdamW(stochastic_rounding=True) (changes the mathematics)",
    )
    parser.add_argument(
        "--real", action="store_true", help="trace one real step on this machine, for control flow that sees values"
    )
    parser.add_argument("-o", "--output", help="save the plan that is to be pasted as JSON")


class _Progress:
    """Says on stderr what goes on, once that has taken a while."""

    def __init__(self) -> None:
        self._what, self._late = "starting", False
        self._timer = threading.Timer(_PATIENCE_SECONDS, self._wait_is_over)
        self._timer.daemon = True

    def __enter__(self) -> Callable[[str], None]:
        self._timer.start()
        return self._next

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _next(self, what: str) -> None:
        self._what = what
        if self._late:
            print(f"hetmem plan: {what} …", file=sys.stderr)

    def _wait_is_over(self) -> None:
        self._late = True
        self._next(self._what)


def run_plan(options: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, 1 if not."""
    if options.hf_config and not Path(options.hf_config).is_file():
        raise HetmemError(
            f"no such file: {options.hf_config}; expected the config.json of a model, as save_pretrained leaves it and "
            f"huggingface_hub.hf_hub_download(name, 'config.json') fetches it"
        )
    collects = gc.isenabled()
    gc.disable()  # a fifth of the time went to looking for what is no garbage
    try:
        with _Progress() as told:
            return _plan(options, told)
    finally:
        if collects:
            gc.enable()


def _plan(options: argparse.Namespace, told: Callable[[str], None]) -> int:
    from hetmem import planner
    from hetmem.planner.plan import described

    named = options.hardware or planner.DEFAULT_HARDWARE
    profile = planner.load_profile(named)
    profile = profile.with_values(dict(_figure(text) for text in options.set or ()))
    device, host = (
        None if text is None else parse_size(text, name)
        for text, name in ((options.device_memory, "--device-memory"), (options.host_memory, "--host-memory"))
    )
    if device is not None and device > profile.device.memory_bytes:
        has, asked = format_size(profile.device.memory_bytes), format_size(device)
        print(f"hetmem plan: {profile.name} has {has} for programs: planned with that, not {asked}", file=sys.stderr)
    limits = Limits(device, host, parse_size(options.nvme, "--nvme"), (), None, None)
    chunk_bytes = None if options.chunk_bytes is None else parse_size(options.chunk_bytes, "--chunk-bytes")
    same = "micro_batches checkpointing overlap gradients real moments stochastic_rounding inference activations"
    plan = planner.plan_within(
        _call(options),
        planner.capacities_of(limits, profile),
        profile,
        chunk_bytes=chunk_bytes,
        nvme_directories=tuple(options.nvme_dir or ()),
        profile_name=None if options.set else named,
        told=told,
        **{name: getattr(options, name) for name in same.split()},
    )
    if options.output:
        plan.best.save(options.output)
    print(described(plan, options.output))
    return 0 if plan.fits else 1


def _call(options: argparse.Namespace) -> Any:
    """The model and its batch, as they were named."""
    import torch

    from hetmem import planner

    precision = options.precision or ("bfloat16" if options.hf_config else "float32")
    mixed = None if precision == "float32" else getattr(torch, precision)
    loss = _function(options.loss) if options.loss else None
    inputs = [_named_input(text) for text in options.input or ()]
    if options.hf_config:
        if any(name is None for name, _ in inputs):
            raise planner.PlanError("with --hf-config an input has a name: --input input_features=4x80x3000:float32")
        batch = 1 if options.batch is None else options.batch
        sequence = 2048 if options.sequence is None else options.sequence
        named = {name: tensor for name, tensor in inputs if name is not None}
        call = planner.hugging_face_call(options.hf_config, batch, sequence, mixed, named, loss)
    elif options.batch is not None or options.sequence is not None:
        raise planner.PlanError("--batch and --sequence go with --hf-config; with MODULE:FUNCTION: --input 4x2048")
    elif not inputs:
        raise planner.PlanError("say what the model is called with: --input 4x2048, once for each input")
    elif len({name is None for name, _ in inputs}) > 1:
        raise planner.PlanError("give all inputs a name, or none: --input NAME=4x2048")
    else:
        by_name = {name: tensor for name, tensor in inputs if name is not None}
        call = planner.TracedCall(
            _function(options.builder), by_name or tuple(tensor for _, tensor in inputs), loss, mixed
        )
    if options.lora is not None:
        return planner.with_adapters(call, options.lora)
    alone = options.inference and mixed is torch.bfloat16  # no update needs weights in float32
    return planner.in_bfloat16(call) if options.stochastic_rounding or alone else call


def _named_input(text: str) -> tuple[str | None, Any]:
    """`NAME=` if there is one, and the tensor."""
    name, equals, shape = text.partition("=")
    return (name, _input(shape)) if equals else (None, _input(text))


def _function(name: str) -> Callable[..., Any]:
    from hetmem.planner import PlanError

    module, _, attribute = name.partition(":")
    if not attribute or module.endswith(".py"):
        raise PlanError(
            f"expected MODULE:FUNCTION, e.g. my_model:build for the function build in my_model.py here, got {name!r}"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"cannot find {name}: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise PlanError(f"{name} is no function: expected one, got {found!r}")
    return found  # type: ignore[no-any-return]


def _input(text: str) -> Any:
    import torch

    from hetmem.planner import PlanError

    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "int64", None)
    sizes = shape.split("x")
    if not isinstance(dtype, torch.dtype) or not all(size.isdigit() and int(size) for size in sizes):
        raise PlanError(f"--input: expected sizes and a dtype, e.g. 4x2048 or 8x3x224x224:float32, got {text!r}")
    try:
        return torch.empty([int(size) for size in sizes], dtype=dtype, device="meta")
    except (RuntimeError, TypeError, OverflowError) as error:
        raise PlanError(f"--input: there is no tensor of {text!r}: {str(error).splitlines()[0]}") from error


def _figure(text: str) -> tuple[str, float]:
    """A dotted name and a number, or a size with a unit ("12GB", "12GB/s")."""
    from hetmem.base.hardware import ProfileError

    name, equals, value = text.partition("=")
    if not equals:
        raise ProfileError(f"--set: expected FIGURE=VALUE, e.g. nvme_read.bytes_per_second=12GB, got {text!r}")
    try:
        return name, float(value)
    except ValueError:
        rate = _RATE.fullmatch(value)
        return name, parse_size(rate[1] if rate else value, name)
