"""The best part of updates on the device with streamed states, beside the host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetmem.base.hardware import HardwareProfile
from hetmem.schedule.update_split import WORTH
from tests.schedule.tested import Costs, DeviceProfile, HostProfile, Rate, Way, streamed_part, update_costs

GB = 1e9
SECONDS = st.floats(0.0, 10.0)
RESOURCES = ("up", "down", "dram", "hbm")


def machine(pcie: float, dram: float, both: float = 0.0) -> HardwareProfile:
    return HardwareProfile(
        "made up",
        DeviceProfile(80 * 10**9, 3000 * GB, {"bfloat16": 1e15}),
        HostProfile(10**12, 64, dram * GB, dram * GB),
        Rate(pcie * GB),
        Rate(pcie * GB),
        Rate(5 * GB),
        Rate(5 * GB),
        both * GB or 2 * pcie * GB,
    )


def busiest(costs: Costs, host: float, streamed: float, resident: float) -> float:
    shares = {Way.HOST: host, Way.STREAMED: streamed, Way.RESIDENT: resident}
    return max(sum(shares[way] * terms[name] for way, terms in costs.items()) for name in costs[Way.HOST])


@given(
    st.fixed_dictionaries({way: st.fixed_dictionaries(dict.fromkeys(RESOURCES, SECONDS)) for way in Way}),
    st.floats(0.0, 0.9),
)
def test_no_other_part_is_noticeably_better(costs: Costs, resident: float) -> None:
    part, away = streamed_part(costs, resident), 1 - resident
    assert 0 <= part <= 1
    best = busiest(costs, away * (1 - part), away * part, resident)
    for other in (step / 24 for step in range(25)):
        enough = busiest(costs, away * (1 - other), away * other, resident)
        assert best <= (enough if part else enough / WORTH) * (1 + 1e-9) + 1e-9


def test_states_are_streamed_until_link_and_memory_are_busy_alike() -> None:
    """At 25 and 100 GB/s a host update takes 2 bytes of the link and 28 of the cores, a streamed one 16 of the link, so
    that (2 h + 16 s) / 25 = 28 h / 100, where s = 5/21 of what does not live on the device."""
    costs = update_costs(machine(25, 100), 10**9, copy_bytes=2, gradient_bytes=2)
    assert streamed_part(costs, 0.25) == pytest.approx(5 / 21)
    assert streamed_part(costs, 0.0) == pytest.approx(5 / 21)


def test_a_fast_host_beside_a_slow_link_updates_all_that_does_not_fit() -> None:
    assert streamed_part(update_costs(machine(12, 400), 10**9, copy_bytes=4, gradient_bytes=4), 0.5) == 0.0


def test_gradients_that_stay_on_the_device_cross_no_link_where_states_do() -> None:
    """(2 h + 12 s) / 25 = 28 h / 100, where s = 5/17."""
    costs = update_costs(machine(25, 100), 10**9, copy_bytes=2, gradient_bytes=2, gradients_stay=True)
    assert streamed_part(costs, 0.0) == pytest.approx(5 / 17)
    assert costs[Way.STREAMED]["both_ways"] == pytest.approx(24 / 50)
    assert costs[Way.STREAMED]["device_memory"] == pytest.approx((28 + 24 + 2) / 3000)
    assert costs[Way.HOST] == update_costs(machine(25, 100), 10**9, copy_bytes=2, gradient_bytes=2)[Way.HOST]
