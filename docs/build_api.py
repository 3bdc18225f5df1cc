"""Writes docs/api.md, the API reference, from signatures and docstrings: `make docs`, or `python docs/build_api.py`.

Needs the standard library and hetmem. It adds nothing: what the reference should say is said in the docstrings.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

TARGET = Path(__file__).with_name("api.md")
HEAD = """\
# API reference

Made from the docstrings by `make docs`; do not edit it here. Shorter ways in: [recipes](recipes.md),
[concepts](concepts.md), [optimizers](optimizer.md), [tuning](tuning.md), [the report](report.md),
[byte formulas](formulas.md).
"""
PACKAGES = ("hetmem", "hetmem.optim", "hetmem.errors")
"""Every public name of these is documented."""
ELSEWHERE = (
    "hetmem.optim.optimizer:OffloadedOptimizer",
    "hetmem.optim.unmanaged:UnmanagedOptimizer",
    "hetmem.optim.states_report:StatesReport",
    "hetmem.optim.options:Overlap",
    "hetmem.schedule.blocks:EvictionPolicy",
    "hetmem.schedule.blocks:CopyFacts",
    "hetmem.planner.plan:Plan",
    "hetmem.planner.states:OptimizerPlan",
    "hetmem.planner.ranked:RanksPlan",
    "hetmem.planner.plan:PlanError",
    "hetmem.planner:load_profile",
    "hetmem.planner:known_profiles",
    "hetmem.base.hardware:HardwareProfile",
    "hetmem.base.hardware:ProfileError",
    "hetmem.report.live:top",
    "hetmem.integrations:scalars",
    "hetmem.integrations:write",
    "hetmem.checkpoint.weights:LoadedWeights",
)
"""What public names take, return or raise."""
FOR_HETMEM = {
    "Budget": ("limits",),
    "OffloadedOptimizer": (
        "needs_all_gradients",
        "expected_scale",
        "groups_by_parameter",
        "number_of",
        "half_stepped",
        "check_state_dict",
        "beside_states",
        "load_beside_states",
    ),
    "SimDevice": (
        "pool",
        "allocate",
        "available_bytes",
        "captures",
        "pin",
        "kept_bytes",
        "peak_bytes",
        "copy_in",
        "gradient_out",
        "tell_refusals",
        "remarks",
        "copier",
    ),
}
"""Methods without an underscore that other layers of hetmem call, and users do not."""


@dataclass(frozen=True)
class Entry:
    """One documented thing: `name` as users write it, `thing` what it is, `depth` 0 for a name, 1 for a member."""

    name: str
    thing: Any
    depth: int

    @property
    def doc(self) -> str:
        """Its own docstring (never an inherited one), without indentation; empty if it has none."""
        target = self.thing if inspect.isclass(self.thing) else _function(self.thing)
        return inspect.cleandoc((vars(target).get("__doc__") if inspect.isclass(target) else target.__doc__) or "")

    @property
    def signature(self) -> str:
        """How it is called; of a property, what it is."""
        if isinstance(self.thing, property):
            return f"{self.name}: {_annotation(inspect.signature(_function(self.thing)).return_annotation)}"
        if inspect.isclass(self.thing) and not _constructed(self.thing):
            bases = ", ".join(base.__name__ for base in self.thing.__bases__ if base is not object)
            return f"class {self.name}({bases})" if bases else f"class {self.name}"
        signature = inspect.signature(_function(self.thing))
        parameters = [p for name, p in signature.parameters.items() if name not in ("self", "cls")]
        returned = signature.return_annotation
        arrow = (
            "" if returned is inspect.Signature.empty or inspect.isclass(self.thing) else f" -> {_annotation(returned)}"
        )
        return f"{self.name}({_arguments(parameters)}){arrow}"


def public_names(package: ModuleType) -> list[str]:
    """What `package` offers: its `__all__`, or the classes and functions that it defines."""
    if hasattr(package, "__all__"):
        return sorted(package.__all__, key=str.lower)
    own = [name for name, thing in vars(package).items() if getattr(thing, "__module__", "") == package.__name__]
    return [name for name in own if not name.startswith("_")]


def entries(name: str, thing: Any) -> Iterator[Entry]:
    """`thing` and, of a class, the methods and properties that it defines itself."""
    yield Entry(name, thing, 0)
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            described = isinstance(value, (property, classmethod, staticmethod, FunctionType))
            internal = member.startswith("_") or member in FOR_HETMEM.get(thing.__name__, ())
            if described and not internal and _function(value).__qualname__ == f"{thing.__qualname__}.{member}":
                yield Entry(f"{name.rpartition('.')[2]}.{member}", value, 1)  # torch copies an inherited `step` here


def sections() -> Iterator[tuple[str, list[Entry]]]:
    """A title and its entries, in the order of the page."""
    seen: set[int] = set()
    for package in PACKAGES:
        module, found = importlib.import_module(package), []
        for name in public_names(module):
            thing = getattr(module, name)
            if id(thing) not in seen:
                seen.add(id(thing))
                found += entries(f"{package}.{name}", thing)
        yield f"`{package}`", found
    found = []
    for place in ELSEWHERE:
        module_name, _, name = place.partition(":")
        found += entries(f"{module_name}.{name}", getattr(importlib.import_module(module_name), name))
    yield "What these take, return or raise", found


def render() -> str:
    """The page."""
    parts = [HEAD]
    for title, found in sections():
        contents = "\n".join(f"- [`{e.name}`](#{anchor(e.name)})" for e in found if not e.depth)
        parts += [f"## {title}\n\n{contents}\n", *map(_text, found)]
    return "\n".join(parts)


def _text(entry: Entry) -> str:
    heading = "#" * (3 + entry.depth)
    return f"{heading} {entry.name}\n\n```python\n{entry.signature}\n```\n\n{entry.doc}\n"


def _function(thing: Any) -> Any:
    """What is behind a method or a property; a class is called itself."""
    if isinstance(thing, property):
        return thing.fget
    return thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing


def _constructed(thing: type) -> bool:
    """Whether users make instances of `thing`: not of errors, enums and protocols."""
    return "__init__" in vars(thing) and not getattr(thing, "_is_protocol", False)


def _arguments(parameters: list[inspect.Parameter]) -> str:
    texts: list[str] = []
    for before, parameter in zip([None, *parameters], parameters, strict=False):
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if keyword_only and (before is None or before.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD):
            texts.append("*")
        texts.append(_argument(parameter))
    line = ", ".join(texts)
    return line if len(line) <= 72 else "\n" + "".join(f"    {text},\n" for text in texts)


def _argument(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        text += f" = {_default(parameter.default)}"
    return text


def _default(value: Any) -> str:
    made_anew = type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"  # a dataclass's default_factory
    return "…" if made_anew else repr(value)


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return "".join(letter for letter in heading.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
