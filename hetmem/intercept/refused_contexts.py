"""What a managed model cannot be called within, and would not notice: told before anything is computed.

It knows torch's wrappers and tracers, and no model.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from hetmem import torch_private
from hetmem.errors import ManageError


def refuse_a_surrounding(model: torch.nn.Module, *, streams: bool) -> None:
    """Raise `ManageError` where the caller of `model` would read its weights or gradients past hetmem; `streams`: they
    are on the device only for operators."""
    if torch.compiler.is_exporting() or (streams and torch_private.tracing_state() is not None):
        raise ManageError(
            "a managed model cannot be exported or traced: do that with copy.deepcopy(model), which is an ordinary "
            "module with the same weights"
        )
    if any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        raise ManageError(
            "torch's fully_shard has replaced the parameters of this managed model, and hetmem would train none of "
            "them: hetmem trains in one process, so leave fully_shard out and build the model again"
        )
    around = DistributedDataParallel._active_ddp_module if streams else None
    if around is not None and any(part is model for part in around.modules()):
        raise ManageError(
            "this model is called by torch's DistributedDataParallel, which reads each gradient before it is at home: "
            "hetmem trains in one process, without that"
        )
