"""A `Call` from a Hugging Face configuration file: the model's class comes from it, the weights are never needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hetmem.planning.modeltrace import Call
from hetmem.planning.plan import PlanError


def hugging_face_call(
    config_file: str | os.PathLike[str], batch: int, sequence: int, mixed_precision: torch.dtype | None
) -> Call:
    """The language model of `config_file` with a batch of `batch` × `sequence` tokens. Raises `PlanError`."""
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            "a Hugging Face configuration needs the package transformers: pip install transformers"
        ) from error
    path = Path(config_file)
    if not path.is_file():
        raise PlanError(f"no such file: {path}")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:
        raise PlanError(f"{path} is no Hugging Face configuration: {error}") from error
    if min(batch, sequence) < 1:
        raise PlanError(f"expected at least one sequence of one token, got {batch} of {sequence}")
    config.use_cache = False
    if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        if mixed_precision is not torch.bfloat16:
            raise PlanError(
                f"{path}: a mixture of experts is planned for bfloat16 only, as the operator whose shapes do not "
                f"depend on the experts that are chosen has no other dtype; got {mixed_precision or torch.float32}"
            )
        config._experts_implementation = "grouped_mm"
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    auto: Any = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    tokens = torch.empty(batch, sequence, dtype=torch.long, device="meta")

    def build() -> torch.nn.Module:
        model: torch.nn.Module = auto.from_config(config, dtype=torch.float32)
        return model

    return Call(build, {"input_ids": tokens, "labels": tokens}, None, mixed_precision)
