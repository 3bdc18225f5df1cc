"""The command line, with the subcommands in `SUBCOMMANDS`.

Turns arguments into calls, and errors into one line on stderr. It computes nothing, and checks that files exist before
it imports anything that takes seconds.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hetmem
from hetmem.base.config import Limits
from hetmem.base.units import format_size, parse_size
from hetmem.base.whole_files import target_of, write_whole
from hetmem.errors import HetmemError, printable
from hetmem.schedule.formats import FORMATS
from hetmem.tools.stages import Stages

atexit.register(gc.freeze)  # skips the collection of all of torch at exit: a second of a plan's ten


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand: `add_arguments` fills its parser, `run` executes it and returns the exit status."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status. 0: done; 1: a plan does not fit, or doctor found a fault; 2: bad
    input, reported in one line on stderr; 130: Ctrl-C; 141: the reader of the output closed it."""
    parser = argparse.ArgumentParser(prog="hetmem", description="Train models larger than the accelerator.")
    parser.add_argument("--version", action="version", version=f"hetmem {hetmem.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for subcommand in SUBCOMMANDS:
        own = commands.add_parser(subcommand.name, help=subcommand.help, description=subcommand.help)
        subcommand.add_arguments(own)
        own.set_defaults(run=subcommand.run)
    options = parser.parse_args(arguments)
    try:
        _check_output(getattr(options, "output", None))
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as with `hetmem … | head`; the rest of the buffer goes to /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (HetmemError, OSError, ValueError) as error:
        _say(f"hetmem {options.command}: {error}", to_stderr=True)
        return 2
    return status


def _say(text: object, *, end: str = "\n", to_stderr: bool = False) -> None:
    """Print `text` without what a terminal would act on: names in it may come from a file."""
    print(printable(str(text)), end=end, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def _check_output(path: str | None) -> None:
    """Refuse an output file that cannot be written, before minutes of work for it. Raises `HetmemError` or OSError."""
    if path is None or isinstance(target_of(path), int):
        return
    file, directory = Path(path), Path(os.path.realpath(path)).parent
    if not file.parent.is_dir():
        raise HetmemError(f"cannot write {path}: there is no directory {file.parent}")
    if file.is_dir():
        raise HetmemError(f"cannot write {path}: it is a directory, name a file in it")
    if (file.is_file() or not file.exists()) and not os.access(directory, os.W_OK):
        raise HetmemError(f"cannot write {path}: nothing may be written in {directory}")


# ---- plan --------------------------------------------------------------------------------------------------------


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--ranks", type=int, help="with --optimizer-only: that fully_shard divides the model among")
    parser.add_argument("--machines", type=int, help="with --optimizer-only: that the ranks are on; default: 1")
    parser.add_argument("--offloaded", action="store_true", help="with --optimizer-only: CPUOffloadPolicy")
    parser.add_argument("-o", "--output", help="save the plan that is to be pasted as JSON")
    parser.add_argument("--write", metavar="FILE", help="write a program that trains as planned, e.g. train.py")


def _say_stage(what: str) -> None:
    _say(f"hetmem plan: {what} …", to_stderr=True)


def _plan(options: argparse.Namespace) -> int:
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
    _check_output(options.write)
    if options.optimizer_only:
        return _plan_optimizer(options)
    if options.ranks or options.machines or options.offloaded:
        raise HetmemError(
            "--ranks, --machines and --offloaded go with --optimizer-only: hetmem.manage is for one process"
        )
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
    _plan_arguments(defaults)
    for name, value in vars(options).items():
        if name not in (*_OPTIMIZER_OPTIONS.split(), "command", "run") and value != defaults.get_default(name):
            raise HetmemError(
                f"--{name.replace('_', '-')} does not go with --optimizer-only: it plans no step of a model"
            )
    nvme = parse_size(options.nvme, "--nvme")
    budget = hetmem.Budget(
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
    _say(plan)
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
        _say(f"hetmem plan: {profile.name} has {has} for programs: planned with that, not {asked}", to_stderr=True)
    limits = Limits(device, host, parse_size(options.nvme, "--nvme"), (), None, None)
    chunk_bytes = None if options.chunk_bytes is None else parse_size(options.chunk_bytes, "--chunk-bytes")
    offline = planner.Offline(Path(options.hf_config)) if options.hf_config else nullcontext()
    scale = options.loss_scale
    same = "micro_batches accumulate tokens checkpointing overlap max_grad_norm real moments stochastic_rounding"
    key = plan_cache.key_of(vars(options), profile)
    plan = plan_cache.kept(key)
    with offline:  # tracing too may make transformers fetch what it computes with
        call: Any = _call(options) if plan is None or options.write else None
        if plan is None:
            plan = planner.plan_within(
                call,
                planner.capacities_of(limits, profile),
                profile,
                chunk_bytes=chunk_bytes,
                nvme_directories=tuple(options.nvme_dir or ()),
                on_stage=begin,
                loss_scale=scale if scale in (None, "dynamic") else float(scale),
                **{name: getattr(options, name) for name in [*same.split(), "inference", "new_tokens", "activations"]},
            )
            plan_cache.keep(key, plan)
        if options.output:
            plan.best.save(options.output)
        _say(plan)
        if options.output and not isinstance(target_of(options.output), int):
            use = script.use_of(plan.best, options.output)
            _say(f"hetmem plan: {options.output} has this plan: {use}", to_stderr=True)
        if options.write:
            source = script.ModelOrigin(options.hf_config, options.builder, options.loss)
            write_whole(Path(options.write), script.script(plan.best, call, source))
            does = "runs" if options.inference else "trains"
            _say(f"hetmem plan: {options.write} {does} this: python {options.write}", to_stderr=True)
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
        call = planner.TracedCall(
            _function(options.builder), by_name or tuple(tensor for _, tensor in inputs), loss, mixed
        )
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


# ---- probe -------------------------------------------------------------------------------------------------------


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", help="write the profile here instead of to stdout")
    parser.add_argument("--nvme-dir", help="a directory on the drive to measure; default: the temporary directory")
    parser.add_argument("--quick", action="store_true", help="fewer bytes: seconds instead of a minute, less exact")


def _probe(options: argparse.Namespace) -> int:
    from hetmem.tools.probe import probe

    def say(what: str) -> None:
        _say(f"hetmem probe: {what}", to_stderr=True)

    text = probe(options.nvme_dir, quick=options.quick, say=say).to_json()
    if options.output:
        try:
            write_whole(Path(options.output), text)
        except OSError:
            _say(text, end="")  # a full disk does not lose a minute's measurements
            raise
    else:
        _say(text, end="")
    return 0


# ---- bench -------------------------------------------------------------------------------------------------------


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("transfers",), help="transfers: the rate of each link, memory and drive")
    parser.add_argument("--nvme-dir", help="a directory on the drive to measure; default: the temporary directory")
    parser.add_argument("--quick", action="store_true", help="fewer bytes: less exact")


def _bench(options: argparse.Namespace) -> int:
    from hetmem.tools.probe import transfers

    for way, rate in transfers(options.nvme_dir, quick=options.quick).items():
        _say(f"{way:15} {rate / 1e9:8.2f} GB/s")
    return 0


# ---- doctor ------------------------------------------------------------------------------------------------------


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nvme-dir", help="also look at this directory")


def _doctor(options: argparse.Namespace) -> int:
    from hetmem.tools.doctor import examine

    findings = examine(options.nvme_dir)
    for finding in findings:
        _say(finding)
    return 0 if all(finding.well is not False for finding in findings) else 1


# ---- report and top ----------------------------------------------------------------------------------------------


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", help="a report saved as .json")
    parser.add_argument("other", nargs="?", help="another one, to compare with")
    parser.add_argument("-o", "--output", help="write a page (.html), a trace (.trace.json) or the numbers (.json)")


def _report(options: argparse.Namespace) -> int:
    from hetmem.report import files

    if options.other and options.output:
        raise HetmemError("a comparison is printed: leave --output out, or name one report")
    if options.output:
        files.render(options.report, options.output)
    else:
        _say(files.compare(options.report, options.other) if options.other else files.show(options.report))
    return 0


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print the present status, and end")


def _top(options: argparse.Namespace) -> int:
    from hetmem.report import live

    in_place = sys.stdout.isatty() and not options.once
    while True:
        text = live.top()
        if in_place:  # overwrite and clear line by line, as clearing the screen flickers
            text = "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\n\x1b[J"
        print(text, flush=True)  # what `live.top` returns is printable
        if options.once:
            return 0
        time.sleep(1)


SUBCOMMANDS: tuple[Subcommand, ...] = (
    Subcommand(
        "plan", "Say whether a model fits, and how long a step will take, before running it.", _plan_arguments, _plan
    ),
    Subcommand(
        "probe",
        "Measure this machine, for `hetmem plan --hardware` and hetmem.manage(hardware=…).",
        _probe_arguments,
        _probe,
    ),
    Subcommand("bench", "Measure the rates of transfers.", _bench_arguments, _bench),
    Subcommand("report", "Show a saved report, turn it into a page, or compare two.", _report_arguments, _report),
    Subcommand("top", "Watch the training processes of this user that call hetmem.progress.", _top_arguments, _top),
    Subcommand(
        "doctor",
        "Report what of hetmem works on this machine, and how to fix the rest.",
        _doctor_arguments,
        _doctor,
    ),
)
