"""Has the modules of a model show working weights under the names of their parameters, for stretches of compute.

An entry in the `__dict__` of a module takes precedence over its `_parameters`, which stay as they are. Most stretches
have all modules show theirs; a recomputation that costs what it uses has each show its own for its call alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import is_, setitem
from typing import Any

import torch

from hetmem.engine.param_views import run_through
from hetmem.engine.runtime import Runtime


class ShowingModules:
    """The modules of the model `module` that have parameters, and what they show in the place of these."""

    def __init__(self, module: torch.nn.Module, runtime: Runtime) -> None:
        self._model, self._by_id = weakref.ref(module), runtime.bindings.by_id
        self._parameters = [managed.parameter for managed in runtime.parameters]
        self._entries: tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]] = [], [], []
        """The `__dict__` and `_parameters` of each module with a parameter, and the parameter's name in them."""
        self._numbers: list[int] = []
        """The indices in `_parameters` of the parameters in `_entries`."""
        self._placed: list[torch.Tensor] = []
        """The working weights for `_entries`."""
        self.entered = self.shown = 0
        """How many stretches of compute use working weights, and how many of these have all modules show them."""
        self.exchanged = False
        """Whether the program has ever put other tensors in the place of parameters for a call (`functional_call`)."""

    def find(self) -> None:
        """Find the modules that have the parameters. Call `place` next."""
        model, numbers = self._model(), {id(parameter): at for at, parameter in enumerate(self._parameters)}
        found = [
            (vars(module), module._parameters, name, numbers[id(parameter)])
            for module in (() if model is None else model.modules())
            for name, parameter in module._parameters.items()
            if id(parameter) in numbers and name not in vars(module)
        ]
        self._entries = [each[0] for each in found], [each[1] for each in found], [each[2] for each in found]
        self._numbers = [each[3] for each in found]

    def place(self, weights: Sequence[torch.Tensor]) -> None:
        """Have modules show `weights`, one for each parameter, from the next `show` on."""
        self._placed = [weights[at] for at in self._numbers]

    def forget(self) -> None:
        """Refer to no working weights until the next `place`."""
        self._placed = []

    def have_parameters(self) -> bool:
        """Return whether the modules that `find` has found still have the same parameters, and none was replaced."""
        _, of, names = self._entries
        found, ours = map(dict.get, of, names), map(self._parameters.__getitem__, self._numbers)
        return all(map(is_, found, ours)) and len({*self._numbers}) == len(self._parameters)

    # ---- all modules -----------------------------------------------------------------------------------------------

    def begin(self, *, shown: bool = True) -> None:
        """Begin a stretch of compute, in which all modules show working weights if `shown`."""
        self.entered += 1
        if shown:
            self.shown += 1
            if self.shown == 1:
                self.show()

    def show(self) -> None:
        """Have all modules show what was placed."""
        where, _, names = self._entries
        run_through(map(setitem, where, names, self._placed))

    def end(self, *, shown: bool) -> None:
        """End `begin`."""
        self.entered -= 1
        self.shown -= shown
        if shown and not self.shown:
            where, _, names = self._entries
            run_through(map(dict.pop, where, names, repeat(None)))

    # ---- one module ------------------------------------------------------------------------------------------------

    def show_in(self, module: torch.nn.Module) -> tuple[dict[str, Any], list[str]] | None:
        """Have `module` show the working weights of its own parameters, where not all modules do. Returns the argument
        of `hide_in`; None if there are none."""
        if self.shown:
            return None
        names, shown = vars(module), list[str]()
        for name, parameter in module._parameters.items():
            managed = self._by_id.get(id(parameter))
            if managed is not None and managed.working is not None and name not in names:
                names[name] = managed.working
                shown += (name,)
        return (names, shown) if shown else None

    def hide_in(self, shown: tuple[dict[str, Any], list[str]]) -> None:
        """End `show_in`."""
        names, of = shown
        for name in () if self.shown else of:
            names.pop(name, None)

    # ---- parameters that the program exchanges ---------------------------------------------------------------------

    def show_exchanged(self, module: torch.nn.Module) -> None:
        """Have parts of `module` show tensors that the program has put in the place of their parameters, and working
        weights again where it has put these back."""
        for part in module.modules() if self.shown else ():
            names = vars(part)
            for name, parameter in part._parameters.items():
                managed = self._by_id.get(id(parameter))
                if managed is None and name in names:
                    del names[name]
                    self.exchanged = True
                elif managed is not None and managed.working is not None and name not in names:
                    names[name] = managed.working

    def uncover(self, module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Have `module` show parameters that the program has exchanged for a call of it (`functional_call`). Returns
        the argument of `cover_again`; None if there are none."""
        names = vars(module)
        found = {
            name: names.pop(name)
            for name, parameter in module._parameters.items()
            if name in names and id(parameter) not in self._by_id
        }
        if not found:
            return None
        self.exchanged = True
        return names, found

    def cover_again(self, uncovered: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """End `uncover`."""
        if self.entered:
            uncovered[0].update(uncovered[1])
