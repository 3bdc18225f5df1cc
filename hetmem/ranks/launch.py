"""Runs a function on several processes of this machine, as a launcher does, for tests."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from hetmem.base.config import set_launcher
from hetmem.ranks import join

_IMPORTED = ["hetmem.ranks.join", "hetmem.testing"]

START = ["forkserver"]
"""How processes start. With "fork" they have what the caller has changed in functions of hetmem; it may have no other
thread then."""


def ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    machines: int = 1,
    seconds: float = 120.0,
    dies: tuple[int, ...] = (),
) -> list[Any]:
    """Return what `function(rank, *arguments)` returns on each of `count` ranks, by rank: processes of one thread each,
    with a process group on gloo and the variables of torchrun.

    `function`, a function of a module, and `arguments` are pickled, and so is what it returns. `machines`: how many
    machines the ranks, a multiple of that, are to see: those of different ones share no memory. `dies`: ranks that end
    by a signal, which give None. Raises RuntimeError, with the tracebacks, if any has raised, or is still running after
    `seconds`; no process is left then.
    """
    context: Any = multiprocessing.get_context(*START)
    context.set_forkserver_preload([*_IMPORTED, function.__module__, "hetmem.ranks.prepared"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        processes = [
            context.Process(target=_run, args=(rank, count, machines, folder, pipes[rank][1], function, arguments))
            for rank in range(count)
        ]
        try:
            for process, (_, end) in zip(processes, pipes, strict=True):
                process.start()
                end.close()
            found = _results([pipe for pipe, _ in pipes], seconds)
        finally:
            for process in processes:
                if process.pid is not None:  # it was started
                    process.kill()
                    process.join()
    failed = [
        f"rank {rank} {kind}: {value}"
        for rank, (kind, value) in enumerate(found)
        if kind != "returned" and not (kind == "ended" and rank in dies)
    ]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [value for _, value in found]


def _results(pipes: list[Connection], seconds: float) -> list[tuple[str, Any]]:
    found: dict[Connection, tuple[str, Any]] = {}
    until = time.monotonic() + seconds
    while len(found) < len(pipes) and time.monotonic() < until:
        for pipe in wait([pipe for pipe in pipes if pipe not in found], max(0.0, until - time.monotonic())):
            assert isinstance(pipe, Connection)
            try:
                found[pipe] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                found[pipe] = "ended", None
    return [found.get(pipe, ("is still running", f"after {seconds:g} s")) for pipe in pipes]


def _run(
    rank: int,
    count: int,
    machines: int,
    folder: str,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    set_launcher(rank, count)
    if machines > 1:
        join.on_machine(f"machine {rank * machines // count}")
    torch.set_num_threads(1)
    try:
        store = (Path(folder) / "store").as_uri()
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
        result = "returned", function(rank, *arguments)
    except BaseException:
        result = "raised", traceback.format_exc()
    pipe.send_bytes(pickle.dumps(result))  # `send` would share the memory of tensors, which ends with this process
