"""The subcommand `plan`: turns its arguments into a call of the planner, and prints the plan.

It computes nothing, and checks that files exist before it imports anything that takes seconds.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetmem.base.config import Budget, Limits
from hetmem.base.units import format_size, parse_size
from hetmem.base.whole_files import target_of, write_whole
from hetmem.errors import HetmemError
from hetmem.schedule.formats import FORMATS
from hetmem.tools.stages import Stages
from hetmem.tools.terminal import check_output, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("builder", nargs="?", metavar="MODULE:FUNCTION", help="a function that builds the model")
    model.add_argument("--hf-config", metavar="FILE", help="a Hugging Face config.json; its `architectures` is planned")
    parser.add_argument("--batch", "--rows", type=int, help="rows of a batch (with --hf-config); default: 1")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence (with --hf-config); default: 2048")
    parser.add_argument(
        "--input",
        action="append",
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="an input of the model, e.g. 4x2048 (int64) or 8x3x224x224:float32; once for each, in order, or by NAME; "
        "with --hf-config in place of the one of that name",
    )
    parser.add_argument(
        "--loss", metavar="MODULE:FUNCTION", help="from the output to a loss, if that has none; or: chunked"
    )
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of that rank beside frozen linear layers in bfloat16"
    )
    parser.add_argument(
        "--frozen",
        metavar="FORMAT",
        choices=FORMATS,
        help=f"as in hetmem.manage(frozen=…): {', '.join(FORMATS)}",
    )
    parser.add_argument("--inference", action="store_true", help="forwards alone, under torch.no_grad()")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="with --new-tokens, in place of --sequence")
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", help="with --inference: so many are generated after the prompt"
    )
    parser.add_argument(
        "--hardware",
        help="a shipped profile (a100, gh200, h100, h200, l4, rtx4090), or a file from `hetmem probe`; default: h100",
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
    parser.add_argument("--micro-batches", type=int, help="forwards and backwards in a step; default: 1")
    parser.add_argument(
        "--accumulate", action="store_true", help="micro-batches pass layer by layer, as hetmem.accumulate has them do"
    )
    parser.add_argument(
        "--tokens", type=int, help="of a step: in as few micro-batches, of the batch or a part of its rows, as fit"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="activations of every repeated layer are computed again"
    )
    parser.add_argument(
        "--activations", default="keep", help="as in hetmem.manage(activations=…): keep, offload or auto"
    )
    parser.add_argument("--overlap", default="off", help="as in hetmem.AdamW(overlap=…): off, backward or forward")
    parser.add_argument("--max-grad-norm", type=float, metavar="NORM", help="as in hetmem.AdamW(max_grad_norm=…)")
    parser.add_argument("--loss-scale", help="as in hetmem.AdamW(loss_scale=…): dynamic, or a number")
    parser.add_argument("--gradients", help=argparse.SUPPRESS)
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
    parser.add_argument(
        "--optimizer-only",
        action="store_true",
        help="of an unmanaged model: hetmem.AdamW(…, budget=…); with --host-memory and --nvme of a rank",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="of a machine, which share the model in --host-memory; with --optimizer-only: that fully_shard divides "
        "the model among",
    )
    parser.add_argument(
        "--machines",
        "--nodes",
        type=int,
        help="with --ranks: so many ranks on each, a copy of the model in the host memory of each; with "
        "--optimizer-only: that all ranks are divided among; default: 1",
    )
    parser.add_argument("--network", help="with --machines: what a machine gets from others, e.g. 50GB/s")
    parser.add_argument("--offloaded", action="store_true", help="with --optimizer-only: CPUOffloadPolicy")
    parser.add_argument("-o", "--output", help="save the plan that is to be pasted as JSON")
    parser.add_argument("--write", metavar="FILE", help="write a program that trains as planned, e.g. train.py")


def _say_stage(what: str) -> None:
    say(f"hetmem plan: {what} …", to_stderr=True)


def run(options: argparse.Namespace) -> int:
    """Print the plan; return 0 if it fits, 1 if not."""
    if options.gradients is not None:
        raise HetmemError(
            f"--gradients is no option any more, got {options.gradients}: with --overlap backward or forward updates "
            f"consume gradients as they arrive; without it they are visible"
        )
    if options.hf_config and not Path(options.hf_config).is_file():
        raise HetmemError(
            f"no such file: {options.hf_config}; expected the config.json of a model, as save_pretrained leaves it and "
            f"huggingface_hub.hf_hub_download(name, 'config.json') fetches it"
        )
    check_output(options.write)
    if options.optimizer_only:
        return _plan_optimizer(options)
    if options.offloaded:
        raise HetmemError("--offloaded goes with --optimizer-only: hetmem.manage keeps homes in host memory by itself")
    if (options.machines or options.network) and options.ranks is None:
        raise HetmemError("--machines and --network need --ranks, the number of each machine")
    if options.ranks is not None and (options.output or options.write):
        raise HetmemError("-o and --write are for plans of one process: several ranks take the code that is printed")
    collects = gc.isenabled()
    gc.disable()  # collections took a fifth of the time, and found nothing
    try:
        with Stages(_say_stage) as stages:
            stages.begin("starting")
            return _planned(options, stages.begin)
    finally:
        if collects:
            gc.enable()


_OPTIMIZER_OPTIONS = "builder hf_config hardware host_memory nvme nvme_dir optimizer_only ranks machines offloaded"


def _plan_optimizer(options: argparse.Namespace) -> int:
    from hetmem import planner

    defaults = argparse.ArgumentParser()
    add_arguments(defaults)
    for name, value in vars(options).items():
        if name not in (*_OPTIMIZER_OPTIONS.split(), "command", "run") and value != defaults.get_default(name):
            raise HetmemError(
                f"--{name.replace('_', '-')} does not go with --optimizer-only: it plans no step of a model"
            )
    nvme = parse_size(options.nvme, "--nvme")
    budget = Budget(
        host=options.host_memory, nvme=nvme, nvme_dir=(options.nvme_dir or [tempfile.gettempdir()]) if nvme else None
    )
    with planner.Offline(Path(options.hf_config)) if options.hf_config else nullcontext():
        plan = planner.plan_optimizer(
            planner.hugging_face_call(options.hf_config, 1, 1, None).build_model
            if options.hf_config
            else _function(options.builder),
            budget,
            hardware=options.hardware,
            ranks=options.ranks or 1,
            machines=options.machines or 1,
            offloaded=options.offloaded,
        )
    say(plan)
    return 0 if plan.fits else 1


def _planned(options: argparse.Namespace, begin: Callable[[str], None]) -> int:
    from hetmem import planner
    from hetmem.tools import plan_cache, script

    named = options.hardware or planner.DEFAULT_HARDWARE
    profile = planner.load_profile(named)
    device, host = (
        None if text is None else parse_size(text, name)
        for text, name in ((options.device_memory, "--device-memory"), (options.host_memory, "--host-memory"))
    )
    if device is not None and device > profile.device.memory_bytes:
        has, asked = format_size(profile.device.memory_bytes), format_size(device)
        say(f"hetmem plan: {profile.name} has {has} for programs: planned with that, not {asked}", to_stderr=True)
    limits = Limits(device, host, parse_size(options.nvme, "--nvme"), (), None, None)
    chunk_bytes = None if options.chunk_bytes is None else parse_size(options.chunk_bytes, "--chunk-bytes")
    offline = planner.Offline(Path(options.hf_config)) if options.hf_config else nullcontext()
    scale = options.loss_scale
    same = "micro_batches accumulate tokens checkpointing overlap max_grad_norm real moments stochastic_rounding"
    how: dict[str, Any] = {
        name: getattr(options, name) for name in [*same.split(), "inference", "new_tokens", "activations"]
    }
    how |= {"chunk_bytes": chunk_bytes, "loss_scale": scale if scale in (None, "dynamic") else float(scale)}
    if options.ranks is not None:
        with offline:
            of_ranks = planner.plan_ranks_within(
                _call(options),
                planner.capacities_of(limits, profile),
                profile,
                options.ranks,
                machines=options.machines or 1,
                network=options.network,
                nvme_directories=tuple(options.nvme_dir or ()),
                on_stage=begin,
                **how,
            )
        say(of_ranks)
        return 0 if of_ranks.fits else 1
    key = plan_cache.key_of(vars(options), profile)
    plan = plan_cache.kept(key)
    with offline:  # tracing too may make transformers fetch what it computes with
        call: Any = _call(options) if plan is None or options.write else None
        if plan is None:
            plan = planner.plan_within(
                call,
                planner.capacities_of(limits, profile),
                profile,
                nvme_directories=tuple(options.nvme_dir or ()),
                on_stage=begin,
                **how,
            )
            plan_cache.keep(key, plan)
        if options.output:
            plan.best.save(options.output)
        say(plan)
        if options.output and not isinstance(target_of(options.output), int):
            use = script.use_of(plan.best, options.output)
            say(f"hetmem plan: {options.output} has this plan: {use}", to_stderr=True)
        if options.write:
            source = script.ModelOrigin(options.hf_config, options.builder, options.loss)
            write_whole(Path(options.write), script.script(plan.best, call, source))
            does = "runs" if options.inference else "trains"
            say(f"hetmem plan: {options.write} {does} this: python {options.write}", to_stderr=True)
    return 0 if plan.fits else 1


def _call(options: argparse.Namespace) -> Any:
    """Return the model and its batch that the options name. Raises `PlanError`."""
    import torch

    from hetmem import planner

    precision = options.precision or ("bfloat16" if options.hf_config else "float32")
    mixed = None if precision == "float32" else getattr(torch, precision)
    loss: Any = options.loss if options.loss in (None, "chunked") else _function(options.loss)
    inputs = [_named_input(text) for text in options.input or ()]
    if options.prompt is not None:
        if options.new_tokens is None or options.sequence is not None:
            raise planner.PlanError("--prompt goes with --inference and --new-tokens, in place of --sequence")
        options.sequence = options.prompt
    if options.hf_config:
        if any(name is None for name, _ in inputs):
            raise planner.PlanError("with --hf-config an input has a name: --input input_features=4x80x3000:float32")
        batch = 1 if options.batch is None else options.batch
        sequence = 2048 if options.sequence is None else options.sequence
        named = {name: tensor for name, tensor in inputs if name is not None}
        call = planner.hugging_face_call(
            options.hf_config, batch, sequence, mixed, named, loss, new_tokens=options.new_tokens or 0
        )
    elif options.batch is not None or options.sequence is not None:
        raise planner.PlanError("--batch and --sequence go with --hf-config; with MODULE:FUNCTION: --input 4x2048")
    elif not inputs:
        raise planner.PlanError("say what the model is called with: --input 4x2048, once for each input")
    elif len({name is None for name, _ in inputs}) > 1:
        raise planner.PlanError("give all inputs a name, or none: --input NAME=4x2048")
    else:
        by_name = {name: tensor for name, tensor in inputs if name is not None}
        builder = planner.with_codings(_function(options.builder))
        call = planner.TracedCall(builder, by_name or tuple(tensor for _, tensor in inputs), loss, mixed)
    alone = options.inference and mixed is torch.bfloat16  # no update needs weights in float32
    if options.lora is not None:
        call = planner.with_adapters(call, options.lora)
    elif options.stochastic_rounding or alone:
        call = planner.in_bfloat16(call)
    return replace(call, frozen=options.frozen)


def _named_input(text: str) -> tuple[str | None, Any]:
    """Parse an `--input`: return its name, None without `NAME=`, and the tensor."""
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
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"cannot find {name}: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise PlanError(f"{name} is no function: expected one, got {found!r}")
    return found


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
