"""The command line: what is entered in `SUBCOMMANDS`.

Turns words into calls and errors into one line on stderr. It computes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hetmem
from hetmem.base.whole_files import write_whole
from hetmem.errors import HetmemError
from hetmem.plan_command import add_arguments, run_plan


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One word behind `hetmem`: `add_arguments` fills its parser, `run` does it and returns the exit status."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. 0: done; 1: a plan does not fit; 2: bad input, said in one line on stderr; 130: Ctrl-C;
    141: the reader of the output closed it."""
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


# ---- probe -------------------------------------------------------------------------------------------------------


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", help="write the profile here instead of to stdout")
    parser.add_argument("--nvme-dir", help="a directory on the drive to measure; default: the temporary directory")
    parser.add_argument("--quick", action="store_true", help="fewer bytes: seconds instead of a minute, less exact")


def _probe(options: argparse.Namespace) -> int:
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
    from hetmem.report import files

    if options.other and options.output:
        raise HetmemError("a comparison is printed: leave --output out, or name one report")
    if options.output:
        files.render(options.report, options.output)
    else:
        print(files.compare(options.report, options.other) if options.other else files.show(options.report))
    return 0


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print the present status, and end")


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
        "plan", "Say whether a model fits, and how long a step will take, before running it.", add_arguments, run_plan
    ),
    Subcommand(
        "probe",
        "Measure this machine, for `hetmem plan --hardware` and hetmem.manage(hardware=…).",
        _probe_arguments,
        _probe,
    ),
    Subcommand("report", "Show a saved report, turn it into a page, or compare two.", _report_arguments, _report),
    Subcommand("top", "Watch the training processes of this user that call hetmem.progress.", _top_arguments, _top),
    Subcommand(
        "doctor", "Say what of hetmem works on this machine, and how to mend the rest.", _doctor_arguments, _doctor
    ),
)
