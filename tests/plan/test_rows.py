"""How many rows of a batch fit in a budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetmem.base.units import MIB
from hetmem.planner.rows import fitting_rows
from hetmem.planner.search import Setting, judged
from hetmem.planner.workload import Workload
from hetmem.schedule.placement import Capacities
from tests.plan.test_planner import HARDWARE, workload

ASKED = Setting(Capacities(40 * MIB, 100 * MIB), MIB)


def batch(rows: int) -> Workload:
    """Each row leaves a quarter of a MiB at each of eight layers."""
    return replace(workload(activation=rows * MIB // 4), rows=rows)


def test_the_rows_found_fit_and_one_more_does_not() -> None:
    found = fitting_rows(batch(2), batch(4), 1000, ASKED, HARDWARE, 1)
    assert found is not None
    assert not isinstance(judged(batch(found), ASKED, HARDWARE, 1), Exception)
    assert isinstance(judged(batch(found + 1), ASKED, HARDWARE, 1), Exception)


@pytest.mark.parametrize("most", [1, 2, 9])
def test_of_a_batch_that_fits_all_rows_do(most: int) -> None:
    assert fitting_rows(batch(2), batch(4), most, ASKED, HARDWARE, 1) == most


def test_a_batch_that_shows_nothing_is_not_judged() -> None:
    assert fitting_rows(batch(2), batch(2), 9, ASKED, HARDWARE, 1) is None
    other = replace(batch(4), events=batch(4).events[:-1])
    assert fitting_rows(batch(2), other, 9, ASKED, HARDWARE, 1) is None
