"""The command line: what is entered in `SUBCOMMANDS`.

Turns words into calls and errors into one line on stderr. It computes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hetmem
from hetmem.base.units import parse_size
from hetmem.base.whole_files import write_whole
from hetmem.errors import HetmemError

_RATE = re.compile(r"(.+?)/s", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One word behind `hetmem`: `add_arguments` fills its parser, `run` does it and returns the exit status."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. 0: done; 1: a plan does not fit; 2: bad input, said in one line on stderr; 130: Ctrl-C;
    141: who reads the output went away."""
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
    except BrokenPipeError:  # `hetmem … | head` has seen enough; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (HetmemError, OSError, ValueError) as error:
        print(f"hetmem {options.command}: {error}", file=sys.stderr)
        return 2
    return status


def _check_output(path: str | None) -> None:
    """Before the work whose result is to be written there, which may take minutes."""
    if path is None:
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
    model.add_argument("--hf-config", metavar="FILE", help="a Hugging Face config.json of a language model")
    parser.add_argument("--batch", type=int, help="sequences of a batch (with --hf-config); default: 1")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence (with --hf-config); default: 2048")
    parser.add_argument(
        "--input",
        action="append",
        metavar="SHAPE[:DTYPE]",
        help="with MODULE:FUNCTION: an input of the model, e.g. 4x2048 (int64) or 8x3x224x224:float32; once for each, "
        "in order",
    )
    parser.add_argument(
        "--loss",
        metavar="MODULE:FUNCTION",
        help="with MODULE:FUNCTION: from the output to a loss, if that is none",
    )
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
    parser.add_argument("--overlap", default="off", help="as in hetmem.AdamW(overlap=…): off, backward or forward")
    parser.add_argument("--gradients", default="visible", help="as in hetmem.AdamW(gradients=…): visible or streamed")
    parser.add_argument(
        "--real", action="store_true", help="trace one real step on this machine, for control flow that sees values"
    )
    parser.add_argument("-o", "--output", help="save the plan as JSON")


def _plan(options: argparse.Namespace) -> int:
    from hetmem import planner

    named = options.hardware or planner.DEFAULT_HARDWARE
    profile = planner.load_profile(named)
    profile = profile.with_values(dict(_figure(text) for text in options.set or ()))
    device, host = options.device_memory, options.host_memory
    capacities = planner.Capacities(
        profile.device.memory_bytes if device is None else parse_size(device, "--device-memory"),
        profile.host.memory_bytes if host is None else parse_size(host, "--host-memory"),
        parse_size(options.nvme, "--nvme"),
    )
    fragments = int(profile.device.allocator_share * capacities.device_bytes)
    capacities = dataclasses.replace(capacities, device_fragment_bytes=fragments)
    chunk_bytes = None if options.chunk_bytes is None else parse_size(options.chunk_bytes, "--chunk-bytes")
    plan = planner.plan_within(
        _call(options),
        capacities,
        profile,
        chunk_bytes=chunk_bytes,
        micro_batches=options.micro_batches,
        checkpointing=options.checkpointing,
        overlap=options.overlap,
        gradients=options.gradients,
        nvme_directories=tuple(options.nvme_dir or ()),
        profile_name=None if options.set else named,
        real=options.real,
    )
    print(plan)
    if options.output:
        plan.save(options.output)
    return 0 if plan.fits else 1


def _call(options: argparse.Namespace) -> Any:
    """The model and its batch, as they were named."""
    import torch

    from hetmem import planner

    precision = options.precision or ("bfloat16" if options.hf_config else "float32")
    mixed = None if precision == "float32" else getattr(torch, precision)
    if options.hf_config:
        if options.input or options.loss:
            raise planner.PlanError("--input and --loss go with MODULE:FUNCTION; with --hf-config: --batch, --sequence")
        batch = 1 if options.batch is None else options.batch
        sequence = 2048 if options.sequence is None else options.sequence
        return planner.hugging_face_call(options.hf_config, batch, sequence, mixed)
    if options.batch is not None or options.sequence is not None:
        raise planner.PlanError("--batch and --sequence go with --hf-config; with MODULE:FUNCTION: --input 4x2048")
    if not options.input:
        raise planner.PlanError("say what the model is called with: --input 4x2048, once for each input")
    inputs = tuple(_input(text) for text in options.input)
    loss = _function(options.loss) if options.loss else None
    return planner.Call(_function(options.builder), inputs, loss, mixed)


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
    from hetmem.schedule.hardware import ProfileError

    name, equals, value = text.partition("=")
    if not equals:
        raise ProfileError(f"--set: expected FIGURE=VALUE, e.g. nvme_read.bytes_per_second=12GB, got {text!r}")
    try:
        return name, float(value)
    except ValueError:
        rate = _RATE.fullmatch(value)
        return name, parse_size(rate[1] if rate else value, name)


# ---- probe -------------------------------------------------------------------------------------------------------


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", help="write the profile here instead of to stdout")
    parser.add_argument("--nvme-dir", help="a directory on the drive to measure; default: the temporary directory")
    parser.add_argument("--quick", action="store_true", help="fewer bytes: seconds instead of a minute, less exact")


def _probe(options: argparse.Namespace) -> int:
    import torch

    from hetmem.tools.probe import probe

    def say(what: str) -> None:
        print(f"hetmem probe: {what}", file=sys.stderr, flush=True)

    text = probe(options.nvme_dir, quick=options.quick, say=say).to_json()
    if options.output:
        try:
            write_whole(Path(options.output), text)
        except OSError:
            print(text, end="")  # a minute's measurements are not lost with a full disk
            raise
    else:
        print(text, end="")
    if torch.cuda.is_available():
        from hetmem.tools.bench_device import keep_ways

        print(keep_ways(quick=options.quick), file=sys.stderr)
    return 0


# ---- bench -------------------------------------------------------------------------------------------------------


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=("transfers",), help="transfers: every way to move and cast, against its ceiling"
    )
    parser.add_argument("--elements", type=int, help="of each tensor; default: 16 Mi")
    parser.add_argument("-o", "--output", help="save the figures as JSON")


def _bench(options: argparse.Namespace) -> int:
    from hetmem.tools import bench

    found = bench.transfers(bench.ELEMENTS if options.elements is None else options.elements)
    print(found)
    if options.output:
        found.save(options.output)
    return 0


# ---- doctor ------------------------------------------------------------------------------------------------------


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nvme-dir", help="also look at this directory")


def _doctor(options: argparse.Namespace) -> int:
    from hetmem.tools.doctor import examine

    findings = examine(options.nvme_dir)
    for finding in findings:
        print(finding)
    return 0 if all(finding.well is not False for finding in findings) else 1


# ---- report and top ----------------------------------------------------------------------------------------------


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", help="a report saved as .json")
    parser.add_argument("other", nargs="?", help="another one, to compare with")
    parser.add_argument("-o", "--output", help="write a page (.html), a trace (.trace.json) or the numbers (.json)")


def _report(options: argparse.Namespace) -> int:
    from hetmem.report import saved

    if options.other and options.output:
        raise HetmemError("a comparison is printed: leave --output out, or name one report")
    if options.output:
        saved.render(options.report, options.output)
    else:
        print(saved.compare(options.report, options.other) if options.other else saved.show(options.report))
    return 0


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print what is there now, and end")


def _top(options: argparse.Namespace) -> int:
    from hetmem.report import live

    in_place = sys.stdout.isatty() and not options.once
    while True:
        text = live.top()
        if in_place:  # over what it showed, whose lines are cleared to their ends: a cleared screen flickers
            text = "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\n\x1b[J"
        print(text, flush=True)
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
    Subcommand("report", "Show a saved report, turn it into a page, or compare two.", _report_arguments, _report),
    Subcommand("top", "Watch the training processes of this user that call hetmem.progress.", _top_arguments, _top),
    Subcommand("bench", "Measure what moves bytes.", _bench_arguments, _bench),
    Subcommand(
        "doctor", "Say what of hetmem works on this machine, and how to mend the rest.", _doctor_arguments, _doctor
    ),
)
