"""The stages of `make gpu`, in order of value. They depend on none before them; `rates` are used if there.

It imports nothing that needs torch: the program that starts stages needs none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """`function` of `module` runs with the stage's `Notes`, for at most `seconds`; one that `stretches` takes what
    the others have left too."""

    name: str
    seconds: float
    module: str
    function: str
    about: str
    stretches: bool = False


def _stage(name: str, seconds: float, place: str, about: str, *, stretches: bool = False) -> Stage:
    module, _, function = place.partition(":")
    return Stage(name, seconds, f"benchmarks.gpu.{module}", function, about, stretches)


STAGES = (
    _stage("smoke", 24, "smoke:smoke", "Three steps of small models, each way that hetmem trains: plain torch's bits?"),
    _stage("links", 18, "links:links", "Host memory populated and registered; copies by size; the host's AdamW."),
    _stage("streamed", 80, "training:streamed", "Layers of Llama 8B in host memory, way by way, against the plan."),
    _stage("peers", 56, "training:peers", "The same GPT by plain torch, hetmem, FSDP2, DeepSpeed and torchao."),
    _stage("largest", 99, "training:largest", "The largest model that plan and machine hold; 11.3 B.", stretches=True),
    _stage("tests", 65, "suites:suites", "The tests that need a GPU, a process for each file.", stretches=True),
    _stage("resident", 38, "training:resident", "Models that fit: managed against plain, eager and compiled."),
    _stage("calls", 8, "machine:calls", "What calls cost the thread that makes them, in microseconds."),
    _stage("facts", 14, "machine:facts", "The machine: GPU, link, memory, cores, disk, versions; seconds of imports."),
    _stage("probe", 40, "machine:probe", "`hetmem probe`, whose profile the plans of later runs take."),
    _stage("activations", 52, "saved:activations", "Activations of 16384 tokens: kept, moved, or computed again."),
)
TOTAL_SECONDS = 540
"""For all stages, the ends of their processes that pass a limit, and the page."""


def chosen(names: str) -> list[Stage]:
    """The stages called so, separated by commas, in order of value; all for "". Raises ValueError for another name."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [stage.name for stage in STAGES]
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no stage {name!r}; known are {', '.join(known)}")
    return [stage for stage in STAGES if not wanted or stage.name in wanted]


def described() -> str:
    """What each stage takes at most, for people."""
    lines = [f"{'stage':10}{'s':>4}  what"]
    lines += [f"{stage.name:10}{stage.seconds:4g}  {stage.about}" for stage in STAGES]
    return "\n".join([*lines, f"{'all':10}{TOTAL_SECONDS:4}  largest and tests may take what the others leave"])
