"""What a trace says of the bytes beside chunks, where no other test asks for it alone."""

from __future__ import annotations

from hetmem.schedule.tracer import StepTracer

BACKWARD = ("backward",)


def traced() -> StepTracer:
    """Of one moment with 100 bytes and a gradient of 60, behind which 20 come; 70 were there before it."""
    tracer = StepTracer()
    tracer.begin(BACKWARD, measured=True)
    tracer.grew(70)
    tracer.moment("mm", (0,), 100)
    tracer.grew(160)
    tracer.sent(100)
    tracer.grew(180, 60)
    tracer.begin(BACKWARD, measured=False)
    return tracer


def test_what_is_there_beside_gradients_on_their_way_is_known_from_each_of_them_to_the_next() -> None:
    """Else one of them counts twice: when it is made, and on its way; a backward would wait for each."""
    tracer = traced()
    assert (tracer.own_bytes, tracer.moment("mm", (0,), 0).non_model_bytes) == (70, 180)
    assert tracer.own_bytes == 160
    tracer.sent(0)
    assert tracer.own_bytes == 120
    tracer.sent(0)
    assert tracer.own_bytes == 160, "one more than there were: the worst"


def test_a_segment_that_leaves_its_trace_expects_the_worst_that_was_seen() -> None:
    tracer = traced()
    tracer.moment("mm", (0,), 0)
    assert tracer.moment("mm", (1,), 0).non_model_bytes == 180
    assert tracer.own_bytes == 160
    tracer.begin(BACKWARD, measured=False)
    assert tracer.known is not None
    assert tracer.known.opening.non_model_bytes == 70
    assert [moment.non_model_bytes for moment in tracer.known.moments] == [180, 180]


def test_a_segment_that_leaves_its_trace_for_one_moment_is_known_as_a_whole() -> None:
    tracer = StepTracer()
    for second, measured in ((1, True), (3, False)):
        tracer.begin(BACKWARD, measured=measured)
        for block in (0, second, 2):
            tracer.moment("mm", (block,), 0)
    tracer.begin(BACKWARD, measured=False)
    assert tracer.known is not None
    assert [moment.blocks for moment in tracer.known.moments] == [(0,), (3,), (2,)]


def test_what_a_segment_needs_that_is_measured_again_is_what_it_needs_now() -> None:
    tracer = traced()
    tracer.moment("mm", (0,), 0)
    tracer.begin(BACKWARD, measured=True)
    assert tracer.moment("mm", (0,), 30).non_model_bytes == 30
