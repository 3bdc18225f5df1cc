"""The HTML page in a real browser: no errors, no network, the numbers of the JSON, hover, zoom, theme, phone width."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hetmem
from tests.report.browser import chromium
from tests.report.logs import backward, blocks, came, forward, moment, to_device, went, window
from tests.report.models import trained
from tests.report.sample import SAMPLE
from tests.report.test_planned import PLANNED
from tests.report.tested import (
    Fault,
    MemoryReport,
    Span,
    Stall,
    files,
    format_seconds,
    format_size,
    step_section,
    timeline_section,
)

NASTY = "</script><img src=x onerror=\"document.title='broken in'\">&amp;{{data}}"
SLOWEST_FRAME_MILLISECONDS = 2000  # not a measurement: only a page that hangs is slower
PEAK = 7 << 20  # bytes, at a single moment
FORMATS = {
    "bytes": format_size,
    "seconds": format_seconds,
    "share": lambda value: f"{value:.1%}",
    "count": lambda value: f"{round(value):,}",
    "plain": lambda value: f"{value:.2f}",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """With one context, of one page: most tests show what they look at there, one after the other."""
    with chromium() as started:
        started.new_context().new_page()
        yield started


WIDE = {"width": 1440, "height": 900}


@contextmanager
def opened(browser: Any, path: Path, *, viewport: dict[str, int] | None = None, **options: Any) -> Iterator[Any]:
    """A page that showed `path`; fails if it wrote to the console, raised, or asked for anything else. With `options`
    it is of a context of its own."""
    said: list[str] = []
    listeners: dict[str, Callable[[Any], None]] = {
        "console": lambda message: said.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: said.append(f"error: {error}"),
        "request": lambda request: said.append(request.url) if request.url != path.as_uri() else None,
    }
    with browser.new_context(**options) if options else nullcontext(browser.contexts[0]) as context:
        page = context.new_page() if options else context.pages[0]
        page.set_viewport_size(viewport or WIDE)
        page.mouse.move(0, 0)
        for event, listener in listeners.items():
            page.on(event, listener)
        try:
            page.goto(path.as_uri())
            if options.get("java_script_enabled", True):
                settle(page)
            yield page
        finally:
            for event, listener in listeners.items():
                page.remove_listener(event, listener)
        assert [line for line in said if not line.startswith("data:")] == []


def settle(page: Any) -> None:
    """Wait until what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def long_step(moments: int = 10_000, chunks: int = 200) -> dict[str, Any]:
    """A report of a step of eight seconds with many moments: every chunk comes, is used and goes, twice."""
    tick, half = 8.0 / moments, moments // 2
    order = [*range(chunks), *reversed(range(chunks))]
    turn = moments // len(order)
    changes, transfers = [], []
    for place, block in enumerate(order):
        start = 100 + place * turn * tick
        changes += [came(start, block), went(start + 4 * turn * tick, block)]
        transfers.append(to_device(start, start + turn * tick, 1 << 20, block))
    changes.sort()
    seen = window(
        segments=[forward(100, 104), backward(104, 107), Span("step", 107, 108)],
        moments=[
            moment(
                100 + i * tick,
                order[min(i // turn, len(order) - 1)],
                non_model_bytes=PEAK if i == moments // 4 + 3 else abs(half - i) << 10,
            )
            for i in range(moments)
        ],
        copies=[change for change in changes if change.at < 108],
        transfers=transfers,
        faults=[Fault(102.0, 3)],
        stalls=[Stall(102.0, 102.5, 3)],
        updates=[Span("chunk 3", 107, 108)],
    )
    tiers = {name: {"used_bytes": 0, "homes": {}, **tier} for name, tier in SAMPLE["tiers"].items()}
    tiers["device"]["capacity_bytes"] = 8 << 20
    facts = [replace(block, tier_bytes=(4096, 4096)) for block in blocks(chunks, parameters=(NASTY,))]
    timeline = timeline_section(seen, facts, (frozenset(), frozenset()))
    timeline["operators"] = [NASTY for _ in timeline["operators"]]
    row = {"operator": "log_softmax_backward_data", "module": NASTY, "held": "temporary", "count": 12, "bytes": PEAK}
    beside = {"bytes": 2 * PEAK, "tensors": [row], "other_bytes": PEAK, "sentence": NASTY}
    sections = {"step": step_section(seen, tiers), "timeline": timeline, "beside_chunks": beside}
    return {**SAMPLE, "model": NASTY, "tiers": tiers, **sections}


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "long.html"
    files.save(long_step(), path)
    return path


def pixels(area: Any, places: list[list[float]]) -> list[list[int]]:
    """Red, green, blue and alpha of a drawing at `places`: second of the step, CSS pixels from its top."""
    script = """(plot, places) => {
        const canvas = plot.querySelector('canvas'), left = 64;
        const {data, width} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return places.map(([second, y]) => {
            const x = Math.floor(left + (width - left) * second / 8);
            return [...data.slice(4 * (Math.floor(y) * width + x), 4 * (Math.floor(y) * width + x) + 4)];
        });
    }"""
    found: list[list[int]] = area.evaluate(script, places)
    return found


def view(page: Any) -> list[float]:
    found: list[float] = page.evaluate("hetmemReport.axis.view")
    return found


def plot(page: Any, title: str) -> Any:
    """The drawing area of the chart with that title, scrolled into view."""
    found = page.get_by_role("img", name=title, exact=True)
    found.scroll_into_view_if_needed()
    return found


def test_every_number_on_the_page_is_that_of_the_json(browser: Any, tmp_path: Path) -> None:
    model = trained("nvme", tmp_path)
    report: MemoryReport = hetmem.report(model)
    hetmem.release(model)
    report.save(tmp_path / "r.html")
    with opened(browser, tmp_path / "r.html") as page:
        shown = page.evaluate(
            "[...document.querySelectorAll('[data-key]')].map((n) => ({...n.dataset, text: n.textContent}))"
        )
    keys = {number["key"] for number in shown}
    assert {"step.seconds", "tiers.device.peak_bytes", "bytes_per_parameter", "beside_chunks.other_bytes"} <= keys
    assert {f"links.{link}.bytes" for link in report.data["links"]} <= keys
    for number in shown:
        value: Any = report.to_dict()
        for part in number["key"].split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        show = FORMATS[number["format"]]  # Python rounds a tie to the even digit, JavaScript up
        assert number["text"] in (show(value), show(value * (1 + 1e-12))), number["key"]


def test_what_was_planned_stands_beside_what_was_measured(browser: Any, tmp_path: Path) -> None:
    for name, data in (("with", {**long_step(), "planned": PLANNED}), ("without", long_step())):
        files.save(data, tmp_path / f"{name}.html")
        with opened(browser, tmp_path / f"{name}.html", viewport={"width": 390, "height": 844}) as page:
            assert page.locator("#planned").is_visible() == (name == "with")
            rows = [row.split("\t") for row in page.locator("#plan tr").all_inner_texts()]
            assert page.evaluate("document.documentElement.scrollWidth") == 390
        if name == "with":
            assert rows[1] == ["Step time", "1.50 s", "8.00 s", "−81.3%"]  # 81.25: JavaScript rounds a tie up
            assert rows[2][:3] == ["Compute", "1.25 s", format_seconds(data["step"]["terms"]["compute"])]
            assert rows[-2:] == [["Host peak", "50 B", "50 B", "+0.0%"], ["NVMe peak", "0 B", "50 B", "−100.0%"]]


def test_all_that_was_planned_is_seen_on_a_phone(browser: Any, tmp_path: Path) -> None:
    data = long_step()
    data["tiers"] = {tier: {**facts, "peak_bytes": 234_567 << 20} for tier, facts in data["tiers"].items()}
    planned = {**PLANNED, "peak_bytes": dict.fromkeys(data["tiers"], 123_456 << 20)}
    files.save({**data, "planned": planned}, tmp_path / "wide.html")
    with opened(browser, tmp_path / "wide.html", viewport={"width": 390, "height": 844}) as page:
        box = page.locator("#planned .scroll")
        assert "120.56 GiB\t229.07 GiB" in box.inner_text()
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_a_window_of_no_width_draws_nothing_and_the_next_one_draws(browser: Any, long_page: Path) -> None:
    """A browser may ask for a frame before it has laid the page out."""
    with opened(browser, long_page) as page:
        drawn = "document.querySelector('#charts canvas').width"
        wide = page.evaluate(drawn)
        for width in ("0px", "30px"):
            page.evaluate(f"byId('charts').style.width = '{width}'; dispatchEvent(new Event('resize'))")
            settle(page)
            assert page.evaluate(drawn) == wide
        page.evaluate("byId('charts').style.width = '400px'; dispatchEvent(new Event('resize'))")
        settle(page)
        assert page.evaluate(drawn) == 400


@pytest.mark.parametrize("width", [390, 1440])
def test_no_label_left_of_a_chart_is_cut_off(browser: Any, long_page: Path, width: int) -> None:
    script = """() => [...document.querySelectorAll('#charts canvas')].map((canvas) =>
        canvas.getContext('2d').getImageData(0, 0, 4, canvas.height).data.reduce((sum, value) => sum + value, 0))"""
    with opened(browser, long_page, viewport={"width": width, "height": 900}) as page:
        edges = page.evaluate(script)
        assert len(edges) >= 4
        assert set(edges) == {0}


def test_long_names_take_three_lines_and_end_with_what_tells_them_apart(browser: Any, tmp_path: Path) -> None:
    data = long_step()
    for number, facts in enumerate(data["timeline"]["blocks"]):
        facts["parameters"] = [f"{'a_module_with_a_long_name.' * 12}{number}"] * 6
    files.save(data, tmp_path / "names.html")
    with opened(browser, tmp_path / "names.html", viewport={"width": 390, "height": 844}) as page:
        cell = page.locator("#chunks td.names div").first
        assert cell.bounding_box()["height"] < 80
        shown, whole = cell.text_content().split(", ")[0], cell.get_attribute("title").split(", ")[0]
        assert len(shown) == 80
        assert whole.endswith(shown[1:])
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_charts_say_in_words_what_they_show(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        said = {title: plot(page, title).get_attribute("aria-description") for title in ("What ran", "Device memory")}
        assert said["What ran"] == "forward 4.00 s, backward 3.00 s, optimizer step 1.00 s"
        assert "peak " in said["Device memory"]
        assert said["Device memory"].endswith(", budget 8.00 MiB")
        assert plot(page, "Chunks on the device").get_attribute("aria-description") == "200 rows, 1 stall"
        lanes = plot(page, "Busy resources").get_attribute("aria-description")
        assert lanes.startswith("Forward and backward 87.5%, Host optimizer 12.5%")


def test_a_model_that_never_moves_is_said_to_run_forward_and_backward_and_to_have_homes(
    browser: Any, tmp_path: Path
) -> None:
    """Nobody sees its backward begin, nor what else is on the device: "forward" and "peak" would be wrong."""
    model = trained("resident", tmp_path)
    hetmem.report(model).save(tmp_path / "r.html")
    hetmem.release(model)
    with opened(browser, tmp_path / "r.html") as page:
        assert plot(page, "What ran").get_attribute("aria-description").startswith("forward and backward ")
        assert plot(page, "Device memory").get_attribute("aria-description").startswith("homes of ")


def test_the_terms_are_read_to_who_does_not_see_them(browser: Any, long_page: Path) -> None:
    """What is within an image is not."""
    with opened(browser, long_page) as page:
        terms = page.get_by_role("group", name="Seconds of each term of the step time")
        assert terms.get_by_text("Compute").is_visible()


def test_the_sentence_that_binds_is_on_the_page(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        assert page.locator("#sentence").text_content() == long_step()["step"]["sentence"]
        assert page.locator("#terms .binds .name").all_text_contents() == ["Host to device"]


def test_names_of_the_user_are_text_and_never_markup(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        assert page.locator("h1").text_content() == NASTY
        assert page.title() == f"{NASTY}: hetmem report"
        assert page.locator("#chunks td.names").first.text_content() == NASTY
        assert page.locator("img").count() == 0


def test_hovering_tells_what_is_under_the_pointer(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        area = plot(page, "Chunks on the device")
        box = area.bounding_box()
        x = 64 + (box["width"] - 64) * 2.25 / 8  # the middle of the fault of chunk 3
        page.mouse.move(box["x"] + x, box["y"] + 2 + 3.5 * 1.9)
        tip = page.locator("#tip")
        text = tip.inner_text()
        assert "Chunk 3, weights" in text
        assert "Compute waited" in text
        assert "500.0 ms" in text
        assert NASTY in text
        page.mouse.move(5, 5)
        assert not tip.is_visible()


def test_memory_under_the_pointer_is_that_of_the_timeline(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        for _ in range(10):
            page.keyboard.press("+")  # to 7 µs a pixel around the middle
        box = plot(page, "Device memory").bounding_box()
        page.mouse.move(box["x"] + (64 + box["width"]) / 2 + 20, box["y"] + 50)
        memory = long_step()["timeline"]["memory"]["device"]
        index = bisect(memory["at_us"], 4_000_140) - 1
        total = sum(values[index] for values in memory["bytes"].values())
        assert page.locator("#tip .line").all_inner_texts()[-1].split() == ["Together", *format_size(total).split()]


def test_dragging_zooms_to_what_was_dragged_and_a_double_click_shows_all(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        box = plot(page, "Device memory").bounding_box()
        left, width = box["x"] + 64, box["width"] - 64
        page.mouse.move(left + width / 4, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(left + width / 2, box["y"] + 40, steps=4)
        page.mouse.up()
        assert view(page) == pytest.approx([2e6, 4e6], rel=0.01)
        page.mouse.dblclick(left + 40, box["y"] + 40)
        assert view(page) == [0, 8e6]


def test_wheel_buttons_and_keys_zoom_within_the_step(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        area = plot(page, "Device memory")
        area.hover()
        page.keyboard.down("Control")
        page.mouse.wheel(0, -400)
        page.keyboard.up("Control")
        settle(page)
        assert 0 < view(page)[0] < view(page)[1] < 8e6
        page.click("#zoom-reset")
        assert view(page) == [0, 8e6]
        page.click("#zoom-in")
        assert view(page) == [2e6, 6e6]
        page.keyboard.press("ArrowRight")
        assert view(page) == [3e6, 7e6]
        for _ in range(5):
            page.keyboard.press("ArrowRight")
        assert view(page) == [4e6, 8e6]
        page.keyboard.press("0")
        assert view(page) == [0, 8e6]
        for _ in range(60):
            page.keyboard.press("+")
        assert view(page)[1] - view(page)[0] == pytest.approx(20)


def test_the_axis_of_moments_gives_each_the_same_room(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        page.click("#by-moment")
        assert view(page) == [0, 10_001]
        page.click("#zoom-in")
        page.click("#by-time")
        assert view(page) == pytest.approx([2e6, 6e6], rel=0.01)


def test_a_fault_is_red_on_the_map_and_a_copy_is_not(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        row = [2 + (chunk + 0.5) * 1.9 for chunk in range(200)]
        fault, nothing, copy = pixels(
            plot(page, "Chunks on the device"), [[2.25, row[3]], [4.0, row[3]], [4.05, row[199]]]
        )
        assert fault[0] > 150 > 100 > fault[2]
        assert nothing == [0, 0, 0, 0]
        assert copy[3] > 0
        assert copy[2] > copy[0]


def test_a_peak_of_one_moment_in_ten_thousand_is_drawn(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        area = plot(page, "Device memory")
        base, head = area.bounding_box()["height"] - 6, 14
        y = base - 6.5 / 8 * (base - head)
        at, before, after = pixels(area, [[2 + 3 * 0.0008, y], [1.95, y], [2.05, y]])
    assert at[3] > 0
    assert (before[3], after[3]) == (0, 0)


@pytest.mark.parametrize("width", [320, 390, 768, 1440])
def test_the_page_is_never_wider_than_the_screen(browser: Any, long_page: Path, width: int) -> None:
    with opened(browser, long_page, viewport={"width": width, "height": 844}, device_scale_factor=2) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_the_button_turns_it(browser: Any, long_page: Path, scheme: str) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    colours = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
    with opened(browser, long_page, color_scheme=scheme) as page:
        assert page.evaluate(paper) == colours.pop(scheme)
        page.click("#theme")
        assert page.evaluate(paper) == colours.popitem()[1]


def test_ten_thousand_moments_are_drawn_frame_by_frame(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page) as page:
        frames = [page.evaluate("hetmemReport.milliseconds")]
        for key in ("+", "+", "+", "-", "ArrowRight", "0"):
            page.keyboard.press(key)
            settle(page)
            frames.append(page.evaluate("hetmemReport.milliseconds"))
    print("milliseconds of drawing:", [round(frame) for frame in frames])
    assert max(frames) < SLOWEST_FRAME_MILLISECONDS


@pytest.mark.each
@pytest.mark.parametrize("placement", ["resident", "host"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_page_of_any_run_opens_without_an_error(browser: Any, tmp_path: Path, placement: str, steps: int) -> None:
    model = trained(placement, tmp_path, steps=steps)
    report = hetmem.report(model)
    hetmem.release(model)
    report.save(tmp_path / "r.html")
    with opened(browser, tmp_path / "r.html") as page:
        assert page.locator("#missing li").all_inner_texts() == report.data["missing"]
        assert page.locator("#verdict").is_visible() == (steps == 3)
        assert page.locator("#timeline").is_visible() == (steps > 0)


def test_without_scripts_the_page_shows_the_table(browser: Any, long_page: Path) -> None:
    with opened(browser, long_page, java_script_enabled=False) as page:
        assert "of budget" in page.locator("noscript").inner_text()
