"""Hardware profiles by name (those that are shipped) or by path."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from hetmem.schedule.hardware import HardwareProfile, ProfileError

_SHIPPED = resources.files("hetmem").joinpath("profiles")


def known_profiles() -> list[str]:
    """The names of the shipped profiles."""
    names = (file.name for file in _SHIPPED.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def load_profile(name: str | os.PathLike[str]) -> HardwareProfile:
    """The shipped profile `name`, or the one in the file of that name. Raises `ProfileError`."""
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
        return HardwareProfile.from_json(path.read_text(encoding="utf-8"))
    except (ProfileError, UnicodeDecodeError) as error:
        raise ProfileError(f"{text}: {error}") from error
