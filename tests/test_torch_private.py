"""Private names of torch are in one module, and each still is what hetmem takes it for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from hetmem import torch_private

PACKAGE = Path(torch_private.__file__).parent
LATE = {"torch._dynamo"}


def dotted(node: ast.AST) -> str:
    """`torch._C._x` for the expression of that name; "" for what is no such name."""
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    """Whether `name` goes through a private name of torch's modules, or ends in one."""
    parts = name.split(".")
    if parts[0] != "torch" or name.startswith("torch.ops.") or any(name.startswith(each) for each in LATE):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def private_names(source: str) -> set[str]:
    """Private names of torch in `source`: read by attribute, or imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(dotted(node))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if is_private(name)}


def test_no_other_module_reads_a_private_name_of_torch() -> None:
    read = {path.name: private_names(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert read.pop("torch_private.py")
    assert {name: names for name, names in read.items() if names} == {}


def test_a_private_name_is_found_however_it_is_read() -> None:
    assert private_names("import torch\ntorch._C._x()") == {"torch._C", "torch._C._x"}
    assert private_names("from torch.utils._pytree import tree_map") == {"torch.utils._pytree.tree_map"}
    assert private_names("import torch\ntorch.ops.aten._y.default\ntorch.nn.Linear") == set()


def test_a_backward_is_known_by_its_task_and_node() -> None:
    seen: list[tuple[int, str]] = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append((torch_private.current_graph_task(), type(torch_private.current_node()).__name__))
            return grad

    assert torch_private.current_graph_task() == -1
    Identity.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert [name for _, name in seen] == ["IdentityBackward"]
    assert seen[0][0] >= 0
    assert torch_private.current_graph_task() == -1


def test_references_to_a_storage_are_counted() -> None:
    tensor = torch.ones(4)
    before = torch_private.storage_references(tensor.untyped_storage()._cdata)
    view = tensor[:2]
    assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert torch_private.storage_references(tensor.untyped_storage()._cdata) == before + 1
    del view
    assert torch_private.storage_references(tensor.untyped_storage()._cdata) == before


def test_a_parameter_gets_other_memory_and_stays_the_same_object() -> None:
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    address = other.data_ptr()
    torch_private.swap_impl(parameter, other)
    assert parameter.data_ptr() == address
    copied = torch_private.from_dlpack(torch_private.to_dlpack(parameter.detach()))
    assert copied.data_ptr() == address
    assert copied.untyped_storage()._cdata != parameter.untyped_storage()._cdata


def test_modes_transforms_and_hooks_around_are_known() -> None:
    assert (torch_private.function_modes_around(), torch_private.dispatch_modes_around()) == (0, 0)
    assert torch_private.transform_level() is None
    with torch.device("meta"), torch_private.TorchDispatchMode():
        assert (torch_private.function_modes_around(), torch_private.dispatch_modes_around()) == (1, 1)
        assert len(torch_private.function_mode_stack()) == len(torch_private.dispatch_mode_stack()) == 1
    levels: list[object] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        levels.append((torch_private.transform_level() is None, torch_private.is_of_a_transform(x)))
        return x

    torch.vmap(noted)(torch.ones(2))
    assert levels == [(False, True)]
    assert torch_private.autograd._saved_tensors_hooks_is_enabled()
    assert torch_private.autograd._top_saved_tensors_default_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert torch_private.autograd._top_saved_tensors_default_hooks(False) is not None


def test_compilers_and_replaced_names_are_where_they_were() -> None:
    assert torch_private.eval_frame.get_eval_frame_callback() is None
    assert torch_private.tracing_state() is None
    assert callable(torch.autograd._engine_run_backward)
    assert callable(torch.amp.grad_scaler._MultiDeviceReplicator.get)
    assert callable(nn.Module._apply)


@pytest.mark.parametrize("name", sorted(set(torch_private.ATTRIBUTES)))
def test_a_private_attribute_is_there(name: str) -> None:
    parameter, module = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)
    objects = (parameter, module, parameter.untyped_storage(), parameter.exp().grad_fn)
    assert any(hasattr(each, name) for each in objects)
