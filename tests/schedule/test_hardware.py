"""Hardware profiles: what is written is what is read, and whatever is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetmem.base.hardware import HardwareProfile, ProfileError
from tests.schedule.tested import DeviceProfile, HostProfile, Rate


def profile() -> HardwareProfile:
    return HardwareProfile(
        "made up",
        DeviceProfile(80 << 30, 2e12, {"bfloat16": 5e14, "float32": 5e13}),
        HostProfile(512 << 30, 32, 5e10, 1.5e11),
        Rate(5e10, 1e-5),
        Rate(4e10, 1e-5),
        Rate(6e9),
        Rate(4e9),
        7e10,
        {"device": "a test"},
    )


def test_a_profile_survives_json() -> None:
    assert HardwareProfile.from_json(profile().to_json()) == profile()


def test_what_a_disk_does_both_ways_may_be_unknown_but_not_below_zero() -> None:
    assert profile().nvme_both_ways_bytes_per_second == 0.0
    known = HardwareProfile.from_dict(changed("nvme_both_ways_bytes_per_second", 4e9))
    assert known.nvme_both_ways_bytes_per_second == 4e9
    with pytest.raises(ProfileError, match="nvme_both_ways_bytes_per_second: expected a number of zero or more"):
        HardwareProfile.from_dict(changed("nvme_both_ways_bytes_per_second", -1.0))
    with pytest.raises(ProfileError, match="nvme_both_ways_bytes_per_second: expected bytes a second"):
        HardwareProfile.from_dict(changed("nvme_both_ways_bytes_per_second", 4.0))


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    assert Rate(100.0, 0.5).seconds(50) == 1.0


def test_an_unknown_dtype_has_the_slowest_known_matrix_rate() -> None:
    device = profile().device
    assert (device.flops_per_second("bfloat16"), device.flops_per_second("float64")) == (5e14, 5e13)


def changed(path: str, value: Any) -> dict[str, Any]:
    data = json.loads(profile().to_json())
    *groups, last = path.split(".")
    place = data
    for group in groups:
        place = place[group]
    place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (
            "host_to_device.bytes_per_second",
            -3,
            "host_to_device.bytes_per_second: expected a number above zero, got -3",
        ),
        ("nvme_read.bytes_per_second", 0, "nvme_read.bytes_per_second: expected a number above zero, got 0"),
        (
            "nvme_read.latency_seconds",
            -1e-6,
            "nvme_read.latency_seconds: expected a number of zero or more, got -1e-06",
        ),
        ("host.cores", "many", "host.cores: expected a number, got 'many'"),
        ("host.cores", 1.5, "host.cores: expected a whole number, got 1.5"),
        ("device", [], "device: expected an object, got []"),
        ("device.matrix_flops", {}, "device.matrix_flops: expected at least one dtype, got {}"),
        ("device.matrix_flops.bfloat16", None, "device.matrix_flops.bfloat16: expected a number, got None"),
        ("name", 7, "name: expected a string, got 7"),
        ("version", 99, "version: expected 1, got 99"),
        ("host_to_device.by_the_caller", 1, "host_to_device.by_the_caller: expected true or false, got 1"),
        ("device.memory", 1, "device has no field 'memory'"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected_and_got(path: str, value: Any, expected: str) -> None:
    with pytest.raises(ProfileError) as caught:
        HardwareProfile.from_dict(changed(path, value))
    assert expected in str(caught.value)


def test_a_missing_field_is_named() -> None:
    data = profile().to_dict()
    del data["nvme_write"]
    with pytest.raises(ProfileError, match="nvme_write is missing"):
        HardwareProfile.from_dict(data)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match="a hardware profile must be"):
        HardwareProfile.from_json(text)
