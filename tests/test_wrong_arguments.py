"""What is passed by mistake is refused at once, with what was expected."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import hetmem
from hetmem.errors import ManageError

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a size as budget": ({"budget": "20GiB"}, r"expected a hetmem\.Budget\(.*\), got '20GiB'"),
    "a policy's name": ({"policy": "lru"}, r"policy must be an instance like hetmem\.LRU\(\), .* got 'lru'"),
    "a number as plan": ({"plan": 3}, "plan must be what hetmem.plan returned, or the path of its file, got 3"),
}


@pytest.mark.parametrize(("options", "match"), MISTAKES.values(), ids=MISTAKES)
def test_an_argument_of_another_kind_is_refused(options: dict[str, Any], match: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ManageError, match=match):
        hetmem.manage(model, device="sim", **options)
    hetmem.manage(model, hetmem.Budget(device="1MiB", host="1MiB"), device="sim")  # nothing has changed


def test_a_decorator_without_its_call_is_refused_where_it_is_written() -> None:
    with pytest.raises(ManageError, match=r"call it: hetmem\.managed\(hetmem\.Budget\(…\)\) decorates Model"):

        @hetmem.managed
        class Model(nn.Module):
            pass
