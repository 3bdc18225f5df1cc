"""Profiles of machines by name: the shipped ones, and files of `hetmem probe`."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from hetmem.base.hardware import HardwareProfile, ProfileError
from hetmem.base.whole_files import read_regular

DEFAULT_HARDWARE = "h100"
_MOST_PROFILE_BYTES = 1 << 20
_SHIPPED = resources.files("hetmem").joinpath("profiles")


def profile_of(hardware: HardwareProfile | str | os.PathLike[str] | None) -> HardwareProfile:
    """Return `hardware`, or the profile of that name or file; by default `DEFAULT_HARDWARE`. Raises `ProfileError`."""
    asked = DEFAULT_HARDWARE if hardware is None else hardware
    return asked if isinstance(asked, HardwareProfile) else load_profile(asked)


def known_profiles() -> list[str]:
    """Return the names of the shipped profiles."""
    names = (file.name for file in _SHIPPED.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def load_profile(name: str | os.PathLike[str]) -> HardwareProfile:
    """Return the shipped profile `name`, or the one in the file of that name. Raises `ProfileError`."""
    if not isinstance(name, (str, os.PathLike)):
        raise ProfileError(f"hardware must be the name of a profile, its path or a HardwareProfile, got {name!r}")
    text = os.fspath(name)
    if text in known_profiles():
        return HardwareProfile.from_json(_SHIPPED.joinpath(f"{text}.json").read_text())
    path = Path(text)
    if not path.is_file():
        known = ", ".join(known_profiles())
        raise ProfileError(f"no hardware profile {text!r}: it is no file, and the shipped ones are {known}")
    try:
        return HardwareProfile.from_json(read_regular(path, _MOST_PROFILE_BYTES).decode("utf-8"))
    except ValueError as error:
        raise ProfileError(f"{text}: {error}") from error
