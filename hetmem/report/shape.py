"""The shape of a saved report: what each of its keys may hold. docs/report.md describes them; keys may be added."""

from __future__ import annotations

from typing import Any

from hetmem.base.schema import (
    SchemaError,
    Shape,
    expected,
    list_of,
    number,
    one_of,
    or_null,
    record,
    row,
    table_of,
    text,
    whole,
)
from hetmem.ranks.figures import LINKS, PLACES
from hetmem.report.step import TERM_NAMES
from hetmem.schedule.blocks import Link

_LINKS = tuple(link.value for link in Link)
_BYTES = whole(0, 10**18)
_COUNT = whole(0, 10**18)
_MICROSECONDS = whole(0, 10**18)
_SECONDS = number(0.0, 1e12, "seconds")
_RATE = number(0.0, 1e30)
_COVERS = one_of("step", "forward")


def _section(**keys: Shape) -> Shape:
    return record(keys, others=True)


def _columns(**keys: Shape) -> Shape:
    """Return the shape of lists of equal length."""
    section = _section(**{key: list_of(shape) for key, shape in keys.items()})

    def check(value: Any) -> None:
        section(value)
        first = next(iter(keys))
        for key in keys:
            _same_length(value[key], key, len(value[first]), first)

    return check


def _same_length(column: list[Any], key: str, length: int, first: str) -> None:
    if len(column) != length:
        raise SchemaError(f"expected {length} entries, as {first} has, got {len(column)}").within(key)


def _memory(value: Any) -> None:
    """Allow the memory of a tier: bytes by role at the same times."""
    _MEMORY(value)
    for role, column in value["bytes"].items():
        _same_length(column, f"bytes.{role}", len(value["at_us"]), "at_us")


def _all(*shapes: Shape) -> Shape:
    def check(value: Any) -> None:
        for shape in shapes:
            shape(value)

    return check


_MEMORY = _section(at_us=list_of(_MICROSECONDS), bytes=table_of(list_of(_BYTES)))
_TIER = {"capacity_bytes": _BYTES, "peak_bytes": _BYTES, "used_bytes": _BYTES, "homes": table_of(_BYTES)}
_TIERS = {name: _section(**_TIER) for name in ("host", "nvme")}
_DEVICE = record({**_TIER, "chunk_peak_bytes": _BYTES}, {"fragment_bytes": _BYTES}, others=True)
_TERMS = table_of(_SECONDS, TERM_NAMES)
_STEP_SECTION = _section(
    of=_COVERS,
    seconds=number(1e-12, 1e12, "seconds"),
    tokens=_COUNT,
    tokens_per_second=_RATE,
    terms=_TERMS,
    binding=one_of(*TERM_NAMES),
    overlap=number(0.0, 1e12, "a share"),
    exposed_seconds=_TERMS,
    bytes=record(dict.fromkeys(_LINKS, _BYTES)),
    stall_seconds=_SECONDS,
    host_wait_seconds=_SECONDS,
    caught_up_seconds=number(-1.0, 1e12, "seconds"),
    faults=_COUNT,
    moments=_COUNT,
    nvme_written_bytes_per_day=whole(0, 10**30),
    sentence=text(),
)
_STEP = _all(_STEP_SECTION, record({}, {"moments_by_segment": table_of(_COUNT)}, others=True))
_PLANNED = _section(
    hardware=text(1000),
    rows=_COUNT,
    micro_batches=whole(1),
    step_seconds=or_null(_SECONDS),
    terms=_TERMS,
    peak_bytes=record(dict.fromkeys(("device", "host", "nvme"), _BYTES)),
)
_BESIDE_CHUNKS = _section(
    bytes=_BYTES,
    segment=text(),
    step=_COUNT,
    tensors=list_of(_section(operator=text(), module=text(), held=text(), count=_COUNT, bytes=_BYTES)),
    other_bytes=_BYTES,
    sentence=text(),
)
_BETWEEN_STEPS = _section(
    saves=_COUNT,
    saved_bytes=_BYTES,
    save_seconds=_SECONDS,
    save_wait_seconds=_SECONDS,
    parks=_COUNT,
    prepare_seconds=_SECONDS,
    park_seconds=_SECONDS,
    wake_seconds=_SECONDS,
    parked_kept_bytes=_BYTES,
    parked_used_bytes=_BYTES,
)
_RANK = _section(
    rank=_COUNT,
    steps=_COUNT,
    backwards=_COUNT,
    step_seconds=_SECONDS,
    wait_seconds=table_of(_SECONDS, PLACES),
    waited_for_seconds=list_of(_SECONDS),
    last_in_backwards=_COUNT,
    bytes=table_of(_BYTES, LINKS),
)
_RANKS = _section(own=_COUNT, rows=list_of(_RANK), remarks=list_of(text()))
_OF_A_BLOCK = whole(-1, 10**9)
_SPAN = {"from_us": _MICROSECONDS, "until_us": _MICROSECONDS}
_BLOCK = _section(
    chunk=_COUNT,
    role=text(),
    home=text(),
    bytes=_BYTES,
    parameters=list_of(text()),
    fetched_bytes=_BYTES,
    stall_seconds=_SECONDS,
)
_TIMELINE = _section(
    covers=_COVERS,
    seconds=_SECONDS,
    segments=list_of(row(text(), _MICROSECONDS, _MICROSECONDS)),
    launched=list_of(row(text(), _MICROSECONDS, _MICROSECONDS)),
    operators=list_of(text()),
    moments=_columns(at_us=_MICROSECONDS, operator=_COUNT, blocks=list_of(_COUNT)),
    memory=table_of(_memory, ("device", "host", "nvme")),
    blocks=list_of(_BLOCK),
    copies=_columns(block=_COUNT, tier=whole(0, 1), valid_us=_MICROSECONDS, **_SPAN),
    transfers=_columns(link=whole(0, len(_LINKS) - 1), block=_OF_A_BLOCK, bytes=_BYTES, **_SPAN),
    stalls=_columns(block=_OF_A_BLOCK, **_SPAN),
    faults=_columns(block=_OF_A_BLOCK, at_us=_MICROSECONDS),
    updates=_columns(what=text(), **_SPAN),
)
_REPORT = record(
    {
        "created_at": text(100),
        "model": text(1000),
        "device": text(1000),
        "hardware": or_null(text(1000)),
        "options": _section(optimizers=list_of(_section(**{"class": text(1000)}))),
        "versions": table_of(text(1000)),
        "history": _all(_section(of=_COVERS), _columns(seconds=_SECONDS, stall_seconds=_SECONDS, tokens=_COUNT)),
        "parameters": _COUNT,
        "steps": _COUNT,
        "tiers": record({"device": _DEVICE, **_TIERS}),
        "links": record(dict.fromkeys(_LINKS, _section(bytes=_BYTES, seconds=_SECONDS))),
        "fetches": _COUNT,
        "evictions": _COUNT,
        "faults": _COUNT,
        "staging_faults": _COUNT,
        "stall_seconds": _SECONDS,
        "host_wait_seconds": _SECONDS,
        "chunks": _COUNT,
        "chunk_bytes": _BYTES,
        "chunk_waste": number(0.0, 1.0 + 1e-6, "a share"),
        "bytes_per_parameter": number(0.0, 1e18),
        "missing": list_of(text()),
        "step": or_null(_STEP),
        "timeline": or_null(_TIMELINE),
    },
    {
        "updates": table_of(_BYTES, ("host", "resident")),
        "planned": or_null(_PLANNED),
        "loss": or_null(text()),
        "between_steps": _BETWEEN_STEPS,
        "ranks": or_null(_RANKS),
        "activations": or_null(_section(sentence=text())),
        "beside_chunks": or_null(_BESIDE_CHUNKS),
    },
    others=True,
)


def check_report(data: Any) -> None:
    """Raise `SchemaError` unless `data` is a whole report, with terms, blocks and operators that it names."""
    _REPORT(data)
    step, timeline = data["step"], data["timeline"]
    if step is not None and step["binding"] not in step["terms"]:
        problem = expected(f"one of the terms, {', '.join(step['terms'])}", step["binding"])
        raise problem.within("binding").within("step")
    if timeline is None:
        return
    counts = {"operator": len(timeline["operators"]), "block": len(timeline["blocks"])}
    for section in ("moments", "transfers", "stalls", "faults", "copies"):
        for column, count in counts.items():
            most = max(timeline[section].get(column, ()), default=-1)
            if most >= count:
                raise expected(f"indices below {count}", most).within(column).within(section).within("timeline")
