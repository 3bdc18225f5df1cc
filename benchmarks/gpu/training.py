"""Training steps on the GPU: models that fit, models that do not, the largest ones, and the peers."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch

from benchmarks.gpu.models import GPT, Llama, filled_fast, sizes_of, training_step
from benchmarks.gpu.notes import PROFILE, Notes

GIB = 1 << 30


class Steps:
    """`step`, repeated: seconds by the wall, of this thread, and on the compute stream, of each after two that warm
    up; fewer than `rounds` where `seconds` are over before."""

    def __init__(self, step: Callable[[], torch.Tensor], rounds: int, seconds: float, warm_up: int = 2) -> None:
        self.wall: list[float] = []
        self.thread: list[float] = []
        self.stream: list[float] = []
        self.losses: list[float] = []
        until = time.monotonic() + seconds
        for at in range(warm_up + rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            wall, thread = time.perf_counter(), time.thread_time()
            begin.record()
            loss = step()
            end.record()
            thread = time.thread_time() - thread
            torch.cuda.synchronize()
            wall = time.perf_counter() - wall
            if at >= warm_up:
                self.wall.append(wall)
                self.thread.append(thread)
                self.stream.append(begin.elapsed_time(end) / 1e3)
            self.losses.append(float(loss))
            if self.wall and time.monotonic() > until:
                break

    @property
    def seconds(self) -> float:
        """The median by the wall."""
        return statistics.median(self.wall)

    def details(self) -> dict[str, Any]:
        """What stands beside the step's time."""
        return {
            "thread ms": 1e3 * statistics.median(self.thread),
            "stream ms": 1e3 * statistics.median(self.stream),
            "from ms": 1e3 * min(self.wall),
            "to ms": 1e3 * max(self.wall),
            "loss": self.losses[-1],
        }


def busy_seconds(step: Callable[[], Any]) -> float:
    """Of one step: seconds in which a kernel or a copy ran on the GPU, as torch's profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    there = (event for event in seen.events() or () if event.device_type == torch.autograd.DeviceType.CUDA)
    spans = sorted((event.time_range.start, event.time_range.end) for event in there)
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6


def _tokens(batch: int, context: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, context), device="cuda")


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# ---- models that fit --------------------------------------------------------------------------------------------


def resident(notes: Notes) -> None:
    """Everything on the GPU; the ceiling of a managed step is the plain one's."""
    torch.backends.cuda.matmul.allow_tf32 = True
    shapes: dict[str, tuple[tuple[int, int, int], torch.dtype, tuple[int, int]]] = {
        "124 M, float32 (TF32)": ((768, 12, 50304), torch.float32, (8, 1024)),
        "1 B, bfloat16 weights": ((2048, 18, 50304), torch.bfloat16, (4, 1024)),
        "124 M, float32 (TF32), so few tokens that launching binds": ((768, 12, 50304), torch.float32, (1, 128)),
    }
    if notes.small:
        shapes = {name: ((64, 2, 256), dtype, (1, 16)) for name, (_, dtype, _) in shapes.items()}
    for compiled in (False,) if notes.small else (False, True):  # a faked device has no compiler
        for name, (shape, dtype, batch) in list(shapes.items())[: 2 if compiled else None]:
            case = f"{name}, {'compiled' if compiled else 'eager'}"
            notes.attempt(case, _resident, notes, case, shape, dtype, batch, compiled, needs=10 if compiled else 4)
            _free()


def _resident(
    notes: Notes, case: str, shape: tuple[int, int, int], dtype: torch.dtype, batch: tuple[int, int], compiled: bool
) -> None:
    import hetmem

    tokens = _tokens(*batch, shape[2])
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    for name in ("plain", "managed"):
        torch.manual_seed(0)
        with filled_fast():
            model: Any = GPT(*shape).to(dtype)
        if name == "managed":
            room = torch.cuda.memory_allocated() + 64 * sum(parameter.nbytes for parameter in model.parameters()) + GIB
            hetmem.manage(model, hetmem.Budget(device=min(room, torch.cuda.mem_get_info()[1] * 9 // 10), host="1GiB"))
            optimizer: Any = hetmem.AdamW(model.parameters(), lr=1e-4)
        else:
            model.to("cuda")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if compiled:
            for block in model.blocks:
                block.compile()
        steps[name] = training_step(model, optimizer, tokens)
    rounds = 2 if notes.small else 5
    found: dict[str, list[Steps]] = {name: [] for name in steps}
    for turn in range(2):  # in turns, as a GPU's clock changes
        for name, step in steps.items():
            found[name].append(Steps(step, rounds, 3.0, warm_up=0 if turn else 3))
    medians = {name: min(one.seconds for one in turns) for name, turns in found.items()}
    for name, turns in found.items():
        best = min(turns, key=lambda one: one.seconds)
        ceiling = 1e3 * medians["plain"] if name == "managed" else None
        notes.number(f"{case}: {name} step", 1e3 * best.seconds, "ms", ceiling=ceiling, **best.details())
    notes.number(f"{case}: managed / plain", medians["managed"] / medians["plain"], "", ceiling=1.0)
    for name, step in steps.items() if not notes.small else ():  # nor a profiler
        busy = notes.attempt(f"{case}: {name}, GPU busy", busy_seconds, step)
        if busy is not None:
            notes.number(f"{case}: {name}, GPU busy", 1e3 * busy, "ms", of_the_step=busy / medians[name])


# ---- models that do not -----------------------------------------------------------------------------------------


def profile_of(notes: Notes) -> Any:
    """What `hetmem probe` has measured in this run, or the shipped profile of a GPU of this name, with the figures that
    other stages have."""
    import psutil

    from hetmem.base.hardware import HardwareProfile
    from hetmem.planner import known_profiles, load_profile

    probed = notes.folder / PROFILE
    if probed.exists():
        return load_profile(probed)
    device = torch.cuda.get_device_name().lower().replace(" ", "")
    base = load_profile(next((name for name in known_profiles() if name in device), "h100"))
    rates = {"host.memory_bytes": psutil.virtual_memory().total, **notes.rates()}
    figures = base.to_dict()
    for name, rate in rates.items():
        *groups, last = name.split(".")
        place = reduce(getitem, groups, figures)
        if last in place:  # a dtype that the profile lacks is taken as its slowest one
            place[last] = rate
    said = f"{torch.cuda.get_device_name()} ({len(notes.rates())} figures measured)"
    return HardwareProfile.from_dict({**figures, "name": said})


def streamed(notes: Notes) -> None:
    """Layers of Llama's 8 B shape, 8192 tokens, bfloat16 copies of float32 homes in host memory. The ceiling is the
    longest of compute alone, bytes by the links' rates, and the update by the host's."""
    shape: dict[str, Any] = {"depth": 8}
    batch = (4, 2048)
    if notes.small:
        shape = {"depth": 12, "vocabulary": 128, "width": 64, "heads": 4, "groups": 2, "inner": 128}
        batch = (2, 32)
    free = _free_host_bytes()
    while not notes.small and shape["depth"] > 1 and 28 * sum(sizes_of(partial(Llama, **shape))) > 0.8 * free:
        shape["depth"] //= 2
    count = sum(sizes_of(partial(Llama, **shape)))
    notes.text("model", f"{shape['depth']} layers, {count / 1e9:.2f} B parameters, {batch[0]} x {batch[1]} tokens")
    tokens = _tokens(*batch, shape.get("vocabulary", 16384))
    with filled_fast():
        model: Any = Llama(**shape)
    alone = notes.attempt("compute alone", _alone, notes, lambda: Llama(**shape), tokens)
    streaming, trailing = {"overlap": "backward"}, {"overlap": "forward"}
    rows: tuple[tuple[str, float, int, dict[str, str]], ...] = (  # those that say most first
        ("half of the copies", 0.5, 0, streaming),
        ("all copies", 1.2, 0, trailing),
        ("all copies", 1.2, 0, streaming),
        ("half of the copies", 0.5, 0, trailing),
        ("half of the copies, 8 threads update", 0.5, 8, streaming),
        ("half of the copies, 12 threads update", 0.5, 12, streaming),
        ("half of the copies", 0.5, 0, {}),
    )
    for name, share, threads, adamw in rows:
        said = ", ".join(f"{key} {value}" for key, value in adamw.items()) or "overlap off"
        case, chunks = f"{name}, {said}", int(share * 2 * count)
        build = partial(Llama, **shape)
        notes.attempt(case, _streamed, notes, case, build, model, tokens, chunks, adamw, alone, threads, needs=9)
        _free()


@contextmanager
def _some_cores(count: int) -> Iterator[None]:
    """Let the threads that begin within run on the first `count` of this process's cores only; on all if 0."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[:count] if count else all_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def _free_host_bytes() -> int:
    from hetmem.memory.host_memory import free_host_bytes

    return free_host_bytes()


def _alone(notes: Notes, build: Callable[[], Any], tokens: torch.Tensor) -> float:
    """Seconds of forward and backward of a model that lies on the device in bfloat16."""
    with torch.device("cuda"), filled_fast():
        there = build().to(torch.bfloat16)

    def step() -> torch.Tensor:
        loss: torch.Tensor = there(tokens)
        loss.backward()
        there.zero_grad(set_to_none=False)
        return loss.detach()

    seconds = Steps(step, 3, 3.0)
    notes.number("forward and backward alone", 1e3 * seconds.seconds, "ms", **seconds.details())
    return seconds.seconds


def _streamed(
    notes: Notes,
    case: str,
    build: Any,
    model: Any,
    tokens: torch.Tensor,
    chunks: int,
    adamw: Any,
    alone: float | None,
    threads: int,
) -> None:
    import hetmem

    count = sum(parameter.numel() for parameter in model.parameters())
    host = min((18 if adamw else 20) * count + (64 << 20), int(0.9 * _free_host_bytes()))
    device = torch.cuda.mem_get_info()[1] * 9 // 10
    budget = hetmem.Budget(device=device, device_chunks=chunks, host=host, home_copies=True)
    plan = notes.attempt(
        f"{case}: plan",
        hetmem.plan,
        build,
        torch.empty(tokens.shape, dtype=tokens.dtype),
        budget,
        profile_of(notes),
        mixed_precision=torch.bfloat16,
        **adamw,
    )
    start = time.perf_counter()
    hetmem.manage(model, budget, device="cuda", mixed_precision=torch.bfloat16)
    try:
        managed = time.perf_counter() - start
        optimizer = hetmem.AdamW(model.parameters(), lr=1e-4, **adamw)
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        step_of = training_step(model, optimizer, tokens)
        with _some_cores(threads):
            step_of()  # which starts the threads
        steps = Steps(step_of, 1 if notes.small else 3, 5.0, warm_up=1)
        report = hetmem.report(model).to_dict()
    finally:
        hetmem.release(model)
    step = report.get("step") or {}
    moved = step.get("bytes", {})
    rates, links = notes.rates(), ("host_to_device", "device_to_host")
    terms = [
        moved.get(link, 0) / rates[f"{link}.bytes_per_second"] for link in links if f"{link}.bytes_per_second" in rates
    ]
    if "host.update_bytes_per_second" in rates:
        terms.append(28 * count / rates["host.update_bytes_per_second"])
    terms.append(alone or 0.0)
    notes.number(
        f"{case}: step",
        1e3 * steps.seconds,
        "ms",
        ceiling=1e3 * max(terms),
        planned=1e3 * plan.step_seconds if plan is not None and plan.step_seconds else None,
        **steps.details(),
        **{f"{link} GB/s": moved.get(link, 0) / steps.seconds / 1e9 for link in links},
        retries=torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries,
        faults=report["faults"],
        **{"stalls s": report["stall_seconds"], "manage s": managed, "terms": step.get("terms", {})},
        says=step.get("sentence", ""),
    )


# ---- as large as it goes ----------------------------------------------------------------------------------------


def largest(notes: Notes) -> None:
    """What device and host are said to hold by the bytes of a parameter, and the 11.3 B that an H100 has trained; built
    as `@managed` builds, 8192 tokens a step."""
    device, disk = torch.cuda.mem_get_info()[1], shutil.disk_usage(notes.folder).free
    host = int(0.8 * _free_host_bytes())
    room = max(0, device - 13 * GIB)
    """Without activations and the context. A weight takes 17 bytes there (four of float32 and its 16-bit copy), 12.5 on
    the host."""
    streaming: dict[str, Any] = {"overlap": "backward"}
    shapes = {"largest": int((0.9 * room / 17 + host / 13) / 1e9 * 4.95), "11.3 B": 55}
    for case, depth, adamw in (
        ("largest", shapes["largest"], streaming),
        ("11.3 B", 55, streaming),
        ("11.3 B, updates in the next forward", 55, {"overlap": "forward"}),
    ):
        size = 4096, depth, 50304
        if notes.small:
            size, host, room = (64, 8 if case == "largest" else 4, 512), 2 << 20, 0
        count = sum(sizes_of(partial(GPT, *size)))
        states = int(12.5 * count)
        nvme = max(0, states - host - int(0.75 * room))
        if nvme > 0.8 * disk:
            notes.line(name=case, skipped=f"{states / GIB:.0f} GiB of states: device, host and disk hold less")
            continue
        needs = 3.0 if notes.small else 10 + states / GIB / 2.5 + 8 * nvme / GIB / 1.5
        case = f"{case} ({count / 1e9:.1f} B)" if case == "largest" else case
        notes.attempt(case, _largest, notes, case, size, min(host, states), nvme, adamw, needs=needs)
        _free()


def _largest(notes: Notes, case: str, size: tuple[int, int, int], host: int, nvme: int, fast: dict[str, Any]) -> None:
    import hetmem

    tokens = _tokens(*((1, 16) if notes.small else (8, 1024)), size[-1])
    build = partial(GPT, *size, checkpointing=True)
    with tempfile.TemporaryDirectory() as directory:
        limits: dict[str, Any] = {"host": host, **({"nvme": nvme + GIB, "nvme_dir": directory} if nvme else {})}
        budget = hetmem.Budget(**limits)
        start = time.perf_counter()
        plan = notes.attempt(
            f"{case}: plan",
            hetmem.plan,
            build,
            torch.empty(tokens.shape, dtype=tokens.dtype),
            budget,
            profile_of(notes),
            mixed_precision=torch.bfloat16,
            **fast,
        )
        if plan is not None:
            notes.number(f"{case}: to plan", time.perf_counter() - start, "s", fits=plan.fits)
        start = time.perf_counter()
        managed_class = hetmem.managed(budget, device="cuda", mixed_precision=torch.bfloat16)(type("Large", (GPT,), {}))
        with filled_fast():
            model = managed_class(*size, checkpointing=True)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        notes.number(f"{case}: to build", time.perf_counter() - start, "s", parameters=parameters, host=host, nvme=nvme)
        step = training_step(model, hetmem.AdamW(model.parameters(), lr=1e-5, **fast), tokens)
        planned = plan.step_seconds if plan is not None else None
        for at in range(2):  # the first learns the order of uses, the second the best places
            start = time.perf_counter()
            loss = float(step())
            seconds = time.perf_counter() - start
            notes.number(f"{case}: step {at + 1}", seconds, "s", loss=loss)
        later = Steps(step, 1 if notes.small else 4, 12.0, warm_up=0)
        rate = tokens.numel() / later.seconds
        notes.number(
            f"{case}: later steps", later.seconds, "s", planned=planned, **later.details(), **{"tokens a second": rate}
        )
        report = hetmem.report(model).to_dict()
        peaks = (f"{tier} {found['peak_bytes'] / GIB:.2f} GiB" for tier, found in report["tiers"].items())
        notes.text(f"{case}: peaks", ", ".join(peaks))
        notes.text(f"{case}: says", (report.get("step") or {}).get("sentence", ""))


# ---- the others -------------------------------------------------------------------------------------------------


def peers(notes: Notes) -> None:
    """`benchmarks.peers`, in bfloat16; the ceiling is the plain step."""
    from benchmarks import peers as compared

    shape = compared.Shape(width=1024, depth=12, vocabulary=50304, batch=8, context=1024, precision="bfloat16")
    if notes.small:
        shape = compared.Shape(width=64, depth=2, vocabulary=256, batch=1, context=16, precision="float32")

    def tell(found: list[compared.Peer]) -> None:
        base = next((peer for peer in found if peer.name == "plain" and peer.counts), None)
        for peer in found:
            if not peer.counts:
                continue
            last = peer.steps[-1]
            ceiling = None if base is None or peer is base else 1e3 * base.median("wall")
            details = {f"{what} ms": 1e3 * peer.median(what) for what in ("thread", "cpu")}
            details["peak of the process"] = f"{last['host_bytes'] / GIB:.2f} GiB"
            details["of the device"] = f"{last.get('device_bytes', 0) / GIB:.2f} GiB"
            details["built s"] = peer.built
            about = compared.PEERS[peer.name][0]
            notes.number(
                f"{about}: step", 1e3 * peer.median("wall"), "ms", ceiling=ceiling, **details, loss=last["loss"]
            )

    names = [name for name in compared.PEERS if "nvme" not in name]  # which take most of each round
    found = compared.compare(
        names, shape, 2 if notes.small else 8, notes.left() - 4, tell, notes.program("benchmarks.peers")
    )
    for peer in found:
        if not peer.counts:
            notes.line(name=compared.PEERS[peer.name][0], skipped=peer.failed or "no time was left")
