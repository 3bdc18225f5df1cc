"""A `Call` from a Hugging Face configuration file: the class of the model and what it is called with come from there.

The weights are never needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hetmem.planner.model import Call
from hetmem.planner.plan import PlanError

_LABELS = {
    "ForCausalLM": "tokens",
    "LMHeadModel": "tokens",
    "ForMaskedLM": "tokens",
    "ForPreTraining": "tokens",
    "ForConditionalGeneration": "tokens",
    "ForTokenClassification": "tokens",
    "ForSequenceClassification": "rows",
    "ForImageClassification": "rows",
    "ForAudioClassification": "rows",
    "ForMultipleChoice": "rows",
}
"""What `labels` are as long as, by the last part of the name of a class."""


def hugging_face_call(
    config_file: str | os.PathLike[str],
    batch: int,
    sequence: int,
    mixed_precision: torch.dtype | None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Call:
    """The model that `config_file` names in `architectures`, with a batch of `batch` rows, of `sequence` tokens where
    it takes tokens; `inputs` take the place of those of their names. Raises `PlanError`."""
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
    transformers.logging.set_verbosity_error()  # of a model that is never run it has nothing to say
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise PlanError(f"{path} is no Hugging Face configuration: {said}") from error
    if min(batch, sequence) < 1:
        raise PlanError(f"expected at least one sequence of one token, got {batch} of {sequence}")
    config.use_cache = False
    if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        config._experts_implementation = "grouped_mm"
    kind = _class_of(config, path, transformers)
    try:
        made = _inputs_of(kind, config, batch, sequence)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise PlanError(f"there is no tensor of {batch} sequences of {sequence} tokens") from error

    def build() -> torch.nn.Module:
        model: torch.nn.Module = kind._from_config(config, dtype=torch.float32)
        _check_positions(model, path, sequence)
        return model

    return Call(build, {**made, **(inputs or {})}, loss, mixed_precision)


def _class_of(config: Any, path: Path, transformers: Any) -> Any:
    """The class that the configuration names, or the language model of its kind."""
    names = list(getattr(config, "architectures", None) or ())
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if names:
        raise PlanError(f"{path}: transformers {transformers.__version__} has no class {names[0]}, which it names")
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    auto: Any = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        raise PlanError(
            f"{path}: {config.model_type} is no language model and the file names no `architectures`: add the name of "
            f"the class there, or name a function that builds it (hetmem plan MODULE:FUNCTION --input 4x2048)"
        )
    return auto._model_mapping[type(config)]


def _inputs_of(kind: Any, config: Any, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """What a model of the class `kind` is trained with, as its names say."""

    def whole(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.long, device="meta")

    main = getattr(kind, "main_input_name", "input_ids")
    labels = next((what for end, what in _LABELS.items() if kind.__name__.endswith(end)), "")
    found: dict[str, torch.Tensor] = {}
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        found[main] = torch.empty(batch, getattr(config, "num_channels", 3), height, width, device="meta")
    elif main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        found[main] = torch.empty(batch, getattr(config, "num_mel_bins", 80), frames, device="meta")
        sequence = min(sequence, getattr(config, "max_target_positions", sequence))
    else:
        found["input_ids"] = whole(batch, sequence)
        if labels == "tokens" and getattr(config, "is_encoder_decoder", False):
            found["decoder_input_ids"] = whole(batch, sequence)
    if kind.__name__.endswith("ForQuestionAnswering"):
        found |= {"start_positions": whole(batch), "end_positions": whole(batch)}
    elif labels:
        found["labels"] = whole(batch) if labels == "rows" else whole(batch, sequence)
    return found


def _check_positions(model: torch.nn.Module, path: Path, sequence: int) -> None:
    """A table of learned positions ends somewhere; on `meta` nobody notices a look beyond its end."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        known = isinstance(module, torch.nn.Embedding) and (last == "wpe" or "position_emb" in last)
        if known and sequence > module.num_embeddings:
            raise PlanError(
                f"{path}: the model has {module.num_embeddings} positions ({name}), expected a sequence of at most "
                f"so many tokens, got {sequence}: --sequence {module.num_embeddings}"
            )
