"""The command line, with the subcommands in `SUBCOMMANDS`.

Turns arguments into calls, and errors into one line on stderr. It computes nothing, and imports what takes seconds as
it is needed.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hetmem
from hetmem.base.whole_files import write_whole
from hetmem.errors import HetmemError
from hetmem.tools import plan_command
from hetmem.tools.terminal import check_output, say

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
        check_output(getattr(options, "output", None))
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as with `hetmem … | head`; the rest of the buffer goes to /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (HetmemError, OSError, ValueError) as error:
        say(f"hetmem {options.command}: {error}", to_stderr=True)
        return 2
    return status


# ---- probe -------------------------------------------------------------------------------------------------------


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", help="write the profile here instead of to stdout")
    parser.add_argument("--nvme-dir", help="a directory on the drive to measure; default: the temporary directory")
    parser.add_argument("--quick", action="store_true", help="fewer bytes: seconds instead of a minute, less exact")


def _probe(options: argparse.Namespace) -> int:
    from hetmem.tools.probe import probe

    def tell(what: str) -> None:
        say(f"hetmem probe: {what}", to_stderr=True)

    text = probe(options.nvme_dir, quick=options.quick, say=tell).to_json()
    if options.output:
        try:
            write_whole(Path(options.output), text)
        except OSError:
            say(text, end="")  # a full disk does not lose a minute's measurements
            raise
    else:
        say(text, end="")
    return 0


# ---- bench -------------------------------------------------------------------------------------------------------


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("transfers",), help="transfers: the rate of each link, memory and drive")
    parser.add_argument("--nvme-dir", help="a directory on the drive to measure; default: the temporary directory")
    parser.add_argument("--quick", action="store_true", help="fewer bytes: less exact")


def _bench(options: argparse.Namespace) -> int:
    from hetmem.tools.probe import transfers

    for way, rate in transfers(options.nvme_dir, quick=options.quick).items():
        say(f"{way:15} {rate / 1e9:8.2f} GB/s")
    return 0


# ---- doctor ------------------------------------------------------------------------------------------------------


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nvme-dir", help="also look at this directory")


def _doctor(options: argparse.Namespace) -> int:
    from hetmem.tools.doctor import examine

    findings = examine(options.nvme_dir)
    for finding in findings:
        say(finding)
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
        say(files.compare(options.report, options.other) if options.other else files.show(options.report))
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
        "plan",
        "Say whether a model fits, and how long a step will take, before running it.",
        plan_command.add_arguments,
        plan_command.run,
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
