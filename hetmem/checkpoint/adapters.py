"""Adapters of PEFT, as inference engines take them: merged into their base weights, or alone.

PEFT is not imported here: a model that has adapters has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from hetmem.errors import CheckpointError

_MERGED = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "Linear4bit", "Linear8bitLt")
"""The layers of PEFT's LoRA whose merge adds what their `get_delta_weight` returns to one weight."""


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether `model` has adapters of PEFT."""
    return hasattr(model, "active_peft_config") or any(map(_is_adapter, model.modules()))


def adapters_alone(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those of `tensors`, the state dict of `model`, that PEFT saves for its active adapter, by its names.
    Raises `CheckpointError` if `model` is none of PEFT."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise CheckpointError("adapters='only' needs a model of peft.get_peft_model")
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model, dict(tensors), save_embedding_layers=False)
    return found


def base_name(name: str) -> str | None:
    """Return the name in the base model of the weight `name` of a model with adapters; None for one that a merge has in
    others. As `GRPOTrainer` of TRL does before `load_weights` of vLLM."""
    parts = name.removeprefix("base_model.model.").split(".")
    if "original_module" in parts or any(part.startswith("lora_") for part in parts):
        return None
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        parts[at : at + 2] = []  # with the name of the adapter
    return ".".join(part for part in parts if part != "base_layer")


def merges_of(model: torch.nn.Module) -> dict[int, list[Any]]:
    """Return the layers whose adapters a merge adds to a weight, by the `id` of that, in the order in which PEFT's
    merge comes to them. Raises `CheckpointError`, which names it, for one that is more than such a sum."""
    found: dict[int, list[Any]] = {}
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        raise _refused("", type(config).__name__, "is no change of weights")
    for name, module in model.named_modules():
        if not _is_adapter(module):
            continue
        kind = type(module)
        if kind.__name__ == "ModulesToSaveWrapper":
            continue
        if not (kind.__module__.startswith("peft.tuners.lora.") and kind.__name__ in _MERGED):
            raise _refused(name, f"{kind.__module__}.{kind.__name__}", "is no plain LoRA")
        for adapter in _to_merge(module):
            if variant := module.lora_variant.get(adapter):
                raise _refused(name, type(variant).__name__, "is no plain LoRA")
            if module.lora_bias.get(adapter):
                raise _refused(name, "lora_bias=True", "changes a bias, too")
        found.setdefault(id(module.get_base_layer().weight), []).append(module)
    return found


@torch.no_grad()
def merge(layer: Any, weight: torch.Tensor, name: str) -> None:
    """Add the active adapters of `layer` to `weight`, a copy of the weight `name` of its base, with PEFT's bits."""
    for adapter in _to_merge(layer):
        own = [part.weight if isinstance(part, torch.nn.Module) else part for part in _factors(layer, adapter)]
        if own[0].device != own[1].device:
            raise CheckpointError(
                f"one adapter of {name} is on the device and the other one in host memory: export within "
                f"hetmem.parked(model), where all are in host memory"
            )
        delta = layer.get_delta_weight(adapter).detach().to(weight.device)
        weight += delta if hasattr(layer, "lora_A") and adapter in layer.lora_A else delta.to(weight.dtype)


def _factors(layer: Any, adapter: str) -> tuple[Any, Any]:
    if adapter in layer.lora_A:
        return layer.lora_A[adapter], layer.lora_B[adapter]
    return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]


def _to_merge(layer: Any) -> list[str]:
    """Return the adapters that a merge adds: the active ones that are not in the base weight already."""
    if layer.disable_adapters:
        return []
    has = {*layer.lora_A, *layer.lora_embedding_A}
    return [name for name in layer.active_adapters if name in has and name not in layer.merged_adapters]


def _is_adapter(module: torch.nn.Module) -> bool:
    layers: Any = sys.modules.get("peft.tuners.tuners_utils")
    others: Any = sys.modules.get("peft.utils.other")
    return (layers is not None and isinstance(module, layers.BaseTunerLayer)) or (
        others is not None and isinstance(module, others.AuxiliaryTrainingWrapper)
    )


def _refused(name: str, kind: str, why: str) -> CheckpointError:
    where = f"{name} has an adapter that cannot be merged" if name else "the adapter cannot be merged"
    return CheckpointError(
        f"{where}: {kind} {why}. Export adapters='only' for an engine that takes it, or call "
        f"model.merge_adapter() before, and unmerge_adapter() afterwards"
    )
