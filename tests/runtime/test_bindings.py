"""What a parameter is while homes move."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hetmem.engine.param_views import stand_in
from hetmem.intercept import registry
from tests.runtime.harness import manage


@pytest.mark.parametrize("computes", [False, True])
def test_a_weight_whose_home_leaves_the_device_within_a_forward_rests_until_that_is_over(
    computes: bool, tmp_path: Path
) -> None:
    """A custom function takes it as it is then, and its gradient has to be on the device."""
    runtime = registry.of_module(manage(nn.Linear(64, 64), "resident", tmp_path)).runtime
    managed, bindings = runtime.parameters[0], runtime.bindings
    home = managed.home.clone()
    rest = stand_in(home, home.dtype, home.device)
    if computes:
        bindings.leave_home()
    bindings.move_home(managed, home, rest)
    assert managed.parameter.data_ptr() == (rest if computes else home).data_ptr()
    bindings.go_home()
    assert managed.parameter.data_ptr() == home.data_ptr()
