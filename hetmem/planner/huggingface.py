"""A `Call` from a Hugging Face configuration file: the model's class comes from it, the weights are never needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hetmem.planner.model import Call
from hetmem.planner.plan import PlanError


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
        raise PlanError(
            f"no such file: {path}; expected the config.json of a model, as save_pretrained leaves it and "
            f"huggingface_hub.hf_hub_download(name, 'config.json') fetches it"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise PlanError(f"{path} is no Hugging Face configuration: {said}") from error
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
    if type(config) not in auto._model_mapping:
        raise PlanError(
            f"{path}: {config.model_type} is no language model, which --hf-config is for: write a function that builds "
            f"it, and name that with what it is called with (hetmem plan MODULE:FUNCTION --input 8x3x224x224:float32)"
        )
    try:
        tokens = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    except (RuntimeError, TypeError, OverflowError) as error:
        raise PlanError(f"there is no tensor of {batch} sequences of {sequence} tokens") from error

    def build() -> torch.nn.Module:
        model: torch.nn.Module = auto.from_config(config, dtype=torch.float32)
        _check_positions(model, path, sequence)
        return model

    batch_of = {"input_ids": tokens, "labels": tokens} | ({"decoder_input_ids": tokens} if encodes else {})
    return Call(build, batch_of, None, mixed_precision)


def _check_positions(model: torch.nn.Module, path: Path, sequence: int) -> None:
    """A table of learned positions ends somewhere; on `meta` nobody notices a look beyond its end."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        known = isinstance(module, torch.nn.Embedding) and (last == "wpe" or "position" in last)
        if known and sequence > module.num_embeddings:
            raise PlanError(
                f"{path}: the model has {module.num_embeddings} positions ({name}), expected a sequence of at most "
                f"so many tokens, got {sequence}: --sequence {module.num_embeddings}"
            )
