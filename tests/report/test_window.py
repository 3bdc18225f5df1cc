"""Which part of the log a report shows."""

from __future__ import annotations

from tests.report.logs import backward, came, fill, forward, moment, read, went
from tests.report.tested import EventLog, Log, MomentSeen, Span, Transfer, last_window


def log(*segments: Span) -> EventLog:
    events = EventLog()
    events.moments, events.transfers = Log(MomentSeen, 4), Log(Transfer, 4)
    fill(events.segments, *segments)
    return events


def test_a_whole_step_lasts_from_the_end_of_one_to_the_end_of_the_next() -> None:
    events = log(Span("step", 1, 2), forward(3, 4), Span("step", 5, 6), forward(7, 8))
    seen = last_window(events)
    assert seen is not None
    assert (seen.covers, seen.start, seen.end) == ("step", 2, 6)
    assert seen.segments == [forward(3, 4), Span("step", 5, 6)]


def test_without_two_steps_the_window_begins_with_the_last_forward() -> None:
    seen = last_window(log(forward(1, 2), forward(3, 4), backward(4, 5), Span("step", 6, 7)))
    assert seen is not None
    assert (seen.covers, seen.start, seen.end) == ("forward", 3, 7)


def test_a_forward_that_still_runs_is_shown_up_to_now() -> None:
    events = log()
    events.begin_segment("forward")
    seen = last_window(events)
    assert seen is not None
    assert [span.what for span in seen.segments] == ["forward"]
    assert seen.end >= seen.start


class Broken:
    """The clock of a device that has failed, and answers everything with that."""

    def now(self) -> float:
        return 1.0

    def timed_mark(self) -> int:
        return 0

    def passed(self, mark: int) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    wait = when = passed


def test_a_device_that_has_failed_is_forgotten_and_nobody_hears_of_it_here() -> None:
    events = EventLog(clock=Broken(), asynchronous=True)
    for what in ("forward", "backward"):
        events.begin_segment(what)
        events.waited(events.here())
    events.end_segment()
    events.read_marks(wait=True)
    assert not events.segments
    assert events.host_wait_seconds == 0


def test_nothing_that_ran_gives_no_window() -> None:
    assert last_window(log()) is None


def test_entries_outside_are_left_out_but_copies_reach_up_to_now() -> None:
    events = log(Span("step", 1, 2), Span("step", 5, 6))
    fill(events.moments, moment(1.5), moment(2), moment(5.5), moment(6))
    fill(events.transfers, read(1, 2), read(1, 3), read(5, 7), read(6, 7))
    fill(events.copies, came(1, 0), went(3, 0), came(8, 1))
    seen = last_window(events)
    assert seen is not None
    assert seen.moments == [moment(2), moment(5.5)]
    assert seen.transfers == [read(1, 3), read(5, 7)]
    assert seen.copies == [went(3, 0), came(8, 1)]


def test_only_a_full_log_that_begins_within_the_window_has_forgotten_something() -> None:
    events = log(Span("step", 1, 2), Span("step", 5, 6))
    fill(events.moments, moment(3), moment(4), moment(5))
    fill(events.transfers, read(1, 1.5), read(3, 4), read(3, 4), read(3, 4))
    before = last_window(events)
    assert before is not None
    assert before.forgotten == ()
    fill(events.moments, moment(5), moment(5))
    after = last_window(events)
    assert after is not None
    assert after.forgotten == ("moments",)
