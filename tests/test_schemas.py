"""docs/schemas.md names every key of the files, and what it shows as an example is one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from hetmem.base.hardware import (
    PROFILE_VERSION,
    DeviceProfile,
    HardwareProfile,
    HostProfile,
    Rate,
    ThreadCosts,
)
from hetmem.planner.decide import Alternative
from hetmem.planner.plan import PLAN_VERSION, Plan

PAGE = (Path(__file__).parent.parent / "docs" / "schemas.md").read_text(encoding="utf-8")
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
PROFILE = SECTIONS["Hardware profiles"]
EXAMPLE = re.findall(r"```json\n(.*?)```", PROFILE, re.DOTALL)[0]


@pytest.mark.parametrize(
    ("section", "kind", "prefix"),
    [
        ("Hardware profiles", HardwareProfile, ""),
        ("Hardware profiles", DeviceProfile, "device."),
        ("Hardware profiles", HostProfile, "host."),
        ("Hardware profiles", Rate, ""),
        ("Hardware profiles", ThreadCosts, ""),
        ("Plans", Plan, ""),
        ("Plans", Alternative, ""),
    ],
)
def test_every_key_is_named(section: str, kind: Any, prefix: str) -> None:
    named = re.findall(r"`([\w.]+)`", SECTIONS[section].replace(EXAMPLE, ""))
    nested = {name.partition(".")[0] for name in named}
    keys = [f"{prefix}{spec.name}" for spec in dataclasses.fields(kind)]
    assert [key for key in keys if key not in named and key not in nested] == []


def test_the_versions_are_those_of_the_code() -> None:
    assert f"| `version` | {PROFILE_VERSION} |" in PROFILE
    assert f'`"version": {PLAN_VERSION}`' in SECTIONS["Plans"]


def test_the_example_is_a_profile_and_what_it_leaves_out_has_the_default_that_the_page_says() -> None:
    profile = HardwareProfile.from_json(EXAMPLE)
    assert profile.host_to_device == Rate(25e9)
    assert profile.device.operator_seconds == 5e-6
    assert (profile.device.allocator_share, profile.host.numa_nodes) == (0, 1)
    assert HardwareProfile.from_json(profile.to_json()) == profile
