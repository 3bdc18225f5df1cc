"""The best shares of updates on the host, on the device with streamed states, and resident."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetmem.schedule.hardware import HardwareProfile
from tests.schedule.tested import Costs, DeviceProfile, HostProfile, Rate, Shares, Way, best_shares, update_costs

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


def busiest(costs: Costs, base: dict[str, float], host: float, streamed: float, resident: float) -> float:
    shares = {Way.HOST: host, Way.STREAMED: streamed, Way.RESIDENT: resident}
    return max(
        base.get(name, 0.0) + sum(shares[way] * terms.get(name, 0.0) for way, terms in costs.items())
        for name in RESOURCES
    )


@given(
    st.fixed_dictionaries({way: st.fixed_dictionaries(dict.fromkeys(RESOURCES, SECONDS)) for way in Way}),
    st.dictionaries(st.sampled_from(RESOURCES), SECONDS),
    st.floats(0.0, 1.0),
)
def test_no_other_shares_are_better(costs: Costs, base: dict[str, float], most: float) -> None:
    best = best_shares(costs, most, base)
    assert best.host + best.streamed + best.resident == pytest.approx(1)
    assert min(best.host, best.streamed, best.resident) >= 0
    assert best.resident <= most + 1e-6
    assert best.seconds == pytest.approx(busiest(costs, base, best.host, best.streamed, best.resident), abs=1e-6)
    for one in range(13):
        for other in range(13 - one):
            streamed, resident = one / 12, most * other / 12
            if streamed + resident <= 1:
                assert best.seconds <= busiest(costs, base, 1 - streamed - resident, streamed, resident) + 1e-6


def test_what_fits_on_the_device_is_updated_there_and_the_rest_where_link_and_memory_are_busy_alike() -> None:
    """At 25 and 100 GB/s a host update takes 2 bytes of the link and 28 of the cores, a streamed one 16 of the link, so
    that (2 h + 16 s) / 25 = 28 h / 100, where s = 5/21 of what does not fit."""
    costs = update_costs(machine(25, 100), 10**9, copy_bytes=2, gradient_bytes=2)
    best = best_shares(costs, 0.25)
    assert best.resident == 0.25
    assert best.streamed == pytest.approx(0.75 * 5 / 21)
    assert best.seconds == pytest.approx(0.75 * 28 * 16 / 21 / 100)
    assert best_shares({way: costs[way] for way in (Way.HOST, Way.RESIDENT)}, 0.25).seconds == pytest.approx(0.21)


def test_a_fast_host_beside_a_slow_link_updates_all_that_does_not_fit() -> None:
    costs = update_costs(machine(12, 400), 10**9, copy_bytes=4, gradient_bytes=4)
    best = best_shares(costs, 0.5)
    assert best == Shares(0.5, 0.0, 0.5, pytest.approx(0.5 * 4 / 12), best.slowest)
    assert best.slowest in ("device_to_host", "host_to_device", "both_ways")


def test_gradients_that_stay_on_the_device_cross_no_link_where_states_do() -> None:
    """(2 h + 12 s) / 25 = 28 h / 100, where s = 5/17."""
    costs = update_costs(machine(25, 100), 10**9, copy_bytes=2, gradient_bytes=2, gradients_stay=True)
    assert best_shares(costs, 0.0).streamed == pytest.approx(5 / 17)
    assert costs[Way.STREAMED]["both_ways"] == pytest.approx(24 / 50)
    assert costs[Way.STREAMED]["device_memory"] == pytest.approx((28 + 24 + 2) / 3000)
    assert costs[Way.HOST] == update_costs(machine(25, 100), 10**9, copy_bytes=2, gradient_bytes=2)[Way.HOST]


def test_copies_that_are_fetched_again_and_again_leave_the_link_to_them() -> None:
    """Eight micro-batches: streaming states as well would only lengthen the queue."""
    few = update_costs(machine(50, 100), 10**9, copy_bytes=2, gradient_bytes=2)
    many = update_costs(machine(50, 100), 10**9, copy_bytes=2, gradient_bytes=2, fetched_bytes=32)
    assert best_shares(few, 0.0).streamed > best_shares(many, 0.0).streamed == 0.0


def test_a_way_that_does_not_exist_is_not_taken() -> None:
    costs = update_costs(machine(50, 100), 10**9, copy_bytes=2, gradient_bytes=2)
    with pytest.raises(ValueError, match="no way is left"):
        best_shares({Way.RESIDENT: costs[Way.RESIDENT]}, 0.5)
    assert best_shares({Way.HOST: costs[Way.HOST]}, 1.0).host == 1.0
