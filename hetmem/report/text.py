"""Formats a report, or two side by side, as text tables. Knows the dict of a report only."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from hetmem.base.units import format_seconds, format_size, sparks
from hetmem.errors import printable
from hetmem.report.step import TERM_NAMES

_WIDTH = 88
_BETWEEN = "   "
_BAR = 24
_SHOWN = 40
_MODULE_SHOWN = 32
_LINK_NAMES = {link: name for link, name in TERM_NAMES.items() if link not in ("compute", "host_optimizer")}


def table(data: dict[str, Any]) -> str:
    """Return the report for a terminal: plain text without colours, at most 88 columns."""
    head = f"{data['model']}, {data['parameters']:,} parameters, {data['created_at'][:16].replace('T', ' ')} UTC"
    parts = [f"{_wrapped(head)}\n{_wrapped(made_with(data))}", _tiers(data), _links(data)]
    if data.get("ranks") is not None:
        parts.append(_ranks(data["ranks"]))
    if data["step"] is not None:
        parts.append(_step(data))
    if data.get("planned") is not None:
        parts.append(_planned(data))
    if data.get("activations") is not None:
        parts.append(_wrapped(data["activations"]["sentence"]))
    if data.get("beside_chunks") is not None:
        parts.append(_beside_chunks(data["beside_chunks"]))
    parts.append(_summary(data))
    return printable("\n\n".join(parts + [_wrapped(missing) for missing in data["missing"]]))


def line(data: dict[str, Any]) -> str:
    """Return the report in one line: the number of steps, the step time, what binds, and the peaks."""
    step = data["step"]
    speed = (
        f"{format_seconds(step['seconds'])} a {step['of']}, {TERM_NAMES[step['binding']]} binds" if step else "no step"
    )
    peaks = [f"{name} {format_size(tier['peak_bytes'])}" for name, tier in data["tiers"].items() if tier["peak_bytes"]]
    steps = _number_of(data["steps"], "step")
    return printable(f"<MemoryReport of {data['model']}: {steps}, {speed}; peak: {', '.join(peaks)}>")


def made_with(data: dict[str, Any]) -> str:
    """Return the device, the profile, options that are no defaults, and versions, separated by commas."""
    options = dict(data["options"])
    optimizers = options.pop("optimizers", [])
    parts = [data["device"], *([f"profile {data['hardware']}"] if data["hardware"] else [])]
    parts += [f"{name}={value}" for name, value in options.items() if value not in (None, False, "keep")]
    for optimizer in optimizers:
        chosen = {name: value for name, value in optimizer.items() if value not in (None, "off", "visible")}
        name = chosen.pop("class")
        parts.append(f"{name}({', '.join(f'{key}={value}' for key, value in chosen.items())})")
    return ", ".join([*parts, *(f"{name} {version}" for name, version in data["versions"].items())])


def unused(data: dict[str, Any], name: str) -> bool:
    """Return whether the tier, link or term called `name` is NVMe's, and the budget has no NVMe."""
    return name.startswith("nvme") and not data["tiers"]["nvme"]["capacity_bytes"]


def comparison(name_a: str, a: dict[str, Any], name_b: str, b: dict[str, Any]) -> str:
    """Return two reports side by side, with the change from the first to the second."""
    rows = []
    for label, keys, show in _COMPARED:
        left, right = _at(a, keys), _at(b, keys)
        of_no_drive = label.startswith("NVMe") and not (left or right)
        if (left is not None or right is not None) and not of_no_drive:
            texts = ["-" if value is None else show(value) for value in (left, right)]
            rows.append([label, *texts, _change(left, right, points=show is _share)])
    both = ((name_a, a), (name_b, b))
    sentences = [_wrapped(f"{name}: {data['step']['sentence']}") for name, data in both if data["step"]]
    models = [f"{data['model']} of {data['parameters']:,} parameters" for data in (a, b)]
    if models[0] != models[1]:
        sentences.insert(0, _wrapped(f"Two models: {name_a} is of {models[0]}, {name_b} of {models[1]}."))
    kinds = [data["step"]["of"] for _, data in both if data["step"]]
    if len(set(kinds)) > 1:
        sentences.insert(0, f"{name_a} covers a {kinds[0]} and {name_b} a {kinds[1]}.")
    return printable("\n\n".join([grid(["", name_a, name_b, "change"], rows), *sentences]))


def _share(share: float) -> str:
    return f"{share:.1%}"


def _count(number: float) -> str:
    return f"{number:,}"


_COMPARED: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("Step time", ("step", "seconds"), format_seconds),
    *((name, ("step", "terms", term), format_seconds) for term, name in TERM_NAMES.items()),
    ("Tokens a second", ("step", "tokens_per_second"), lambda value: f"{value:,.0f}"),
    ("Overlap", ("step", "overlap"), _share),
    ("Stalls in the step", ("step", "stall_seconds"), format_seconds),
    ("Host waits in the step", ("step", "host_wait_seconds"), format_seconds),
    ("Faults in the step", ("step", "faults"), _count),
    *((f"{name}, bytes a step", ("step", "bytes", link), format_size) for link, name in _LINK_NAMES.items()),
    ("Device peak", ("tiers", "device", "peak_bytes"), format_size),
    ("Host peak", ("tiers", "host", "peak_bytes"), format_size),
    ("NVMe peak", ("tiers", "nvme", "peak_bytes"), format_size),
    ("Chunk size", ("chunk_bytes",), format_size),
    ("Chunk waste", ("chunk_waste",), _share),
    ("Bytes per parameter", ("bytes_per_parameter",), lambda value: f"{value:.2f}"),
    ("Parameters", ("parameters",), _count),
    ("Steps", ("steps",), _count),
)


def _at(data: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        if data is None:
            return None
        data = data.get(key)
    return data


def _change(left: float | None, right: float | None, *, points: bool) -> str:
    """Return the change to `right` in percent, or for a share in `points`, as percent of percent would mislead."""
    if left is None or right is None:
        return ""
    if left == right:
        return "="
    if points:
        return f"{100 * (right - left):+.1f} points"
    return f"{right / left - 1:+.1%}" if left else "new"


def _tiers(data: dict[str, Any]) -> str:
    rows = []
    for name, tier in data["tiers"].items():
        if unused(data, name):
            continue
        share = _share(tier["peak_bytes"] / tier["capacity_bytes"]) if tier["capacity_bytes"] else "-"
        sizes = [format_size(tier[key]) for key in ("peak_bytes", "capacity_bytes")]
        rows.append([name, *sizes, share, format_size(tier["used_bytes"])])
    return grid(["tier", "peak", "budget", "of budget", "used now"], rows)


def _links(data: dict[str, Any]) -> str:
    rows = []
    for name, link in data["links"].items():
        if unused(data, name):
            continue
        rate = f"{format_size(link['bytes'] / link['seconds'])}/s" if link["seconds"] else "-"
        rows.append([name, format_size(link["bytes"]), format_seconds(link["seconds"]), rate])
    return grid(["link, all steps", "moved", "busy", "rate"], rows)


def _ranks(ranks: dict[str, Any]) -> str:
    rows = []
    for row in ranks["rows"]:
        waits, others = row["wait_seconds"], row["waited_for_seconds"]
        longest = max(range(len(others)), key=others.__getitem__)
        rows.append(
            [
                f"{row['rank']}{' (own)' if row['rank'] == ranks['own'] else ''}",
                format_seconds(row["step_seconds"]),
                *(format_seconds(seconds) for seconds in waits.values()),
                str(longest) if others[longest] else "-",
                *map(format_size, row["bytes"].values()),
            ]
        )
    head = ["rank", "a step", "backward", "step", "else", "for", "to device", "from it"]
    sentence = "Of each rank: its last step; its waits for others, by place, and for whom it has waited most; bytes."
    crossed = sum(row["network_bytes"] for row in ranks["rows"])
    beside = sum(row["network_bytes_beside_backwards"] for row in ranks["rows"])
    sentences = [sentence, *ranks["remarks"]]
    if crossed:
        sentences += [f"Sums of other machines: {format_size(crossed)}, {_share(beside / crossed)} beside backwards."]
    return "\n\n".join([grid(head, rows), *map(_wrapped, sentences)])


def _step(data: dict[str, Any]) -> str:
    step, rows = data["step"], []
    for term, seconds in step["terms"].items():
        if unused(data, term) or (step["of"] == "forward" and not seconds):
            continue
        share = seconds / step["seconds"]
        mark = "  binds" if term == step["binding"] else ""
        rows.append([TERM_NAMES[term], format_seconds(seconds), _share(share), "█" * round(share * _BAR) + mark])
    head = [f"last {step['of']}, {format_seconds(step['seconds'])}", "busy", f"of {step['of']}", ""]
    terms = grid(head, rows, left=(0, 3))
    text = f"Overlap {_share(step['overlap'])}. {step['sentence']}{_written(step)}"
    return f"{terms}\n\n{_wrapped(text)}\n{_wrapped(_history(data['history'], step))}"


def _history(past: dict[str, Any], step: dict[str, Any]) -> str:
    """Return the range and bars of the step times in the history, and of the last step the tokens a second and the
    bytes on each link for one of them, which `hetmem.accumulate` makes fewer."""
    seconds, speed = past["seconds"], ""
    if step["tokens"]:
        moved = {_LINK_NAMES[link]: nbytes // step["tokens"] for link, nbytes in step["bytes"].items() if nbytes}
        each = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in moved.items())
        speed = f" {step['tokens_per_second']:,.0f} tokens/s in the last{f'; a token: {each}' if each else ''}."
    if not seconds:
        return speed.strip()
    low, middle, high = (format_seconds(sorted(seconds)[place]) for place in (0, len(seconds) // 2, -1))
    lasted = f"{low} to {high}, median {middle}"
    return f"{_number_of(len(seconds), past['of'])}: {sparks(seconds[-_SHOWN:])} {lasted}.{speed}"


def _written(step: dict[str, Any]) -> str:
    """Return a text on the bytes that the step wrote to NVMe, also per day, as drives are rated; "" if none."""
    nbytes, per_day = step["bytes"]["nvme_write"], step["nvme_written_bytes_per_day"]
    text = f" NVMe: {format_size(nbytes)} written in the step, {format_size(per_day)} a day at this pace."
    return text if nbytes else ""


def _planned(data: dict[str, Any]) -> str:
    """Return a table of planned and measured figures; "-" where no whole step was recorded."""
    planned = data["planned"]
    peaks = {tier: {"peak_bytes": nbytes} for tier, nbytes in planned["peak_bytes"].items()}
    terms = {term: planned["terms"].get(term, 0.0) for term in TERM_NAMES if term != "launching"}  # within compute
    expects = {"step": {"seconds": planned["step_seconds"], "terms": terms}, "tiers": peaks}
    rows = []
    for name, keys, show in _COMPARED:
        expected, seen = _at(expects, keys), _at(data, keys)
        if expected or (seen and expected is not None):
            off = f"{expected / seen - 1:+.1%}" if seen else ""
            rows.append([name, show(expected), "-" if seen is None else show(seen), off])
    batches = "" if planned["micro_batches"] == 1 else f"{planned['micro_batches']} micro-batches of "
    made = f"Planned for {planned['hardware']}, {batches}{_number_of(planned['rows'], 'row')} a step."
    return grid(["", "planned", "this run", "plan is off by"], rows) + "\n\n" + _wrapped(made)


def _beside_chunks(found: dict[str, Any]) -> str:
    rows = [
        (each["operator"], each["module"][-_MODULE_SHOWN:], each["held"], str(each["count"]), each["bytes"])
        for each in found["tensors"]
    ]
    rows.append(("others", "", "", "", found["other_bytes"]))
    sized = [(*names, format_size(nbytes)) for *names, nbytes in rows]
    table = grid(["operator", "module", "held as", "tensors", "bytes"], sized, left=(0, 1, 2))
    return f"{_wrapped(found['sentence'])}\n{table}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH)


def _number_of(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _summary(data: dict[str, Any]) -> str:
    return (
        f"{_number_of(data['steps'], 'step')}; {_number_of(data['fetches'], 'fetch', 'es')}, "
        f"{_number_of(data['evictions'], 'eviction')}, {_number_of(data['faults'], 'fault')} on the device and "
        f"{data['staging_faults']} in staging, {data['stall_seconds']:.2f} s stalled\n"
        f"{_number_of(data['chunks'], 'chunk')} of {format_size(data['chunk_bytes'])}, "
        f"{_share(data['chunk_waste'])} of them unused; "
        f"{data['bytes_per_parameter']:.1f} bytes per parameter{_kept(data['tiers'])}"
        f"{_loss(data.get('loss'))}{_between_steps(data.get('between_steps'))}"
        f"{_updates(data.get('updates', {}))}{_fragments(data['tiers']['device'])}"
    )


_PLACES = {
    "host": "on the host",
    "resident": "on the device, where they live",
}


def _loss(kernel: str | None) -> str:
    """Return a line on how `hetmem.chunked_loss` computed the loss; "" if it did not."""
    return "" if kernel is None else f"\nchunked loss: {kernel}"


def _between_steps(found: dict[str, Any] | None) -> str:
    """Return lines on saves in the background and on parking; "" without any."""
    lines = ""
    if found and (saves := found["saves"]):
        lines += "\n" + _wrapped(
            f"{_number_of(saves, 'save')} in the background, of {format_size(found['saved_bytes'] // saves)} in "
            f"{format_seconds(found['save_seconds'] / saves)} each; training waited "
            f"{format_seconds(found['save_wait_seconds'])} for them in all"
        )
    if found and (parks := found["parks"]):
        lines += "\n" + _wrapped(
            f"parked {_number_of(parks, 'time')}: {format_seconds(found['park_seconds'] / parks)} to park and "
            f"{format_seconds(found['wake_seconds'] / parks)} to wake; host memory for it was ready after "
            f"{format_seconds(found['prepare_seconds'])} in all"
        )
        if kept := found["parked_kept_bytes"]:
            lines += "\n" + _wrapped(
                f"torch's allocator kept {format_size(kept)} of the device then, for tensors of the program that take "
                f"{format_size(found['parked_used_bytes'])}"
            )
    return lines


def _updates(updates: dict[str, int]) -> str:
    """Return a text on the shares of all updated bytes by the place of their update."""
    total = sum(updates.values())
    parts = [f"{_share(nbytes / total)} {_PLACES[way]}" for way, nbytes in updates.items() if nbytes]
    return "\n" + _wrapped(f"updated {', '.join(parts)}") if parts else ""


def _fragments(device: dict[str, Any]) -> str:
    """Return a sentence on the device memory lost to fragmentation of the allocator; "" if none."""
    nbytes = device.get("fragment_bytes", 0)
    advice = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves fewer"
    text = f"up to {format_size(nbytes)} of the device lay in fragments of torch's allocator ({advice})"
    return f"\n{_wrapped(text)}" if nbytes else ""


def _kept(tiers: dict[str, Any]) -> str:
    """Return a line on the memory reserved for homes that are on the device now; "" if none."""
    parts = [
        f"{format_size(tier['homes']['kept'])} of {name}" for name, tier in tiers.items() if "kept" in tier["homes"]
    ]
    return f"\n{' and '.join(parts)} kept for homes that are on the device now" if parts else ""


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return a table with a rule under its head; all columns but those in `left` are right-aligned. The widest columns
    are cut where all together are wider than a page."""
    table = [[cell.strip() for cell in row] for row in (head, *rows)]
    room = [max(map(_columns, column)) for column in zip(*table, strict=True)]
    while (total := sum(room) + len(_BETWEEN) * (len(room) - 1)) > _WIDTH:
        room[room.index(max(room))] -= 1
    lines: list[str] = []
    for row in table:
        shown = [_cut(cell, columns) for cell, columns in zip(row, room, strict=True)]
        spaces = [" " * (columns - _columns(cell)) for cell, columns in zip(shown, room, strict=True)]
        cells = [(cell + space, space + cell) for cell, space in zip(shown, spaces, strict=True)]
        lines.append(_BETWEEN.join(cell[at not in left] for at, cell in enumerate(cells)).rstrip())
    return "\n".join([lines[0], "─" * total, *lines[1:]])


def _columns(text: str) -> int:
    """Return the columns of a terminal that `text` takes."""
    return sum(not unicodedata.combining(each) and 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


def _cut(cell: str, columns: int) -> str:
    if _columns(cell) <= columns:
        return cell
    while _columns(cell) >= columns:
        cell = cell[:-1]
    return f"{cell}…"
