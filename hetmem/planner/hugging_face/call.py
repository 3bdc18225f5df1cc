"""Makes the model that a Hugging Face configuration file names, and the batch it is called with.

The file may come from anywhere: its numbers are checked before a part of the model is built, and only classes of
transformers are made. Weights are never read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from hetmem.base.schema import shown
from hetmem.planner.hugging_face.offline import Offline
from hetmem.planner.hugging_face.sizes import check_file, check_parameters
from hetmem.planner.model import TracedCall
from hetmem.planner.plan import PlanError

_LABELS = {
    "tokens": "ForCausalLM LMHeadModel ForMaskedLM ForPreTraining ForConditionalGeneration ForTokenClassification",
    "rows": "ForSequenceClassification ForImageClassification ForAudioClassification ForMultipleChoice",
}
"""The shape of `labels` ("tokens": one per token, "rows": one per row) by the ending of a model class's name."""


def hugging_face_call(
    config_file: str | os.PathLike[str],
    batch: int,
    sequence: int,
    mixed_precision: torch.dtype | None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    loss: Callable[[Any], torch.Tensor] | Literal["chunked"] | None = None,
    new_tokens: int = 0,
) -> TracedCall:
    """Return the call of the model that `config_file` names in `architectures`, with `batch` rows of `sequence` tokens
    (where it takes tokens), after which `new_tokens` follow; `inputs` replace those of the same names. Nothing is
    looked up in a network, no code beside transformers' is run, and nothing is asked. Raises `PlanError`."""
    path = Path(config_file)
    if min(batch, sequence) < 1:
        raise PlanError(f"expected at least one sequence of one token, got {batch} of {sequence}")
    given = check_file(path)
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            "a Hugging Face configuration needs the package transformers: pip install transformers"
        ) from error
    transformers.logging.set_verbosity_error()  # its warnings are about running the model
    try:
        with Offline(path):
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except PlanError:
        raise
    except Exception as error:
        reason = _first_line(error)
        if "auto_map" in given:
            reason = (
                f"transformers knows no model_type {shown(given.get('model_type'))}, and the code in auto_map is not "
                f"run: name a function that builds the model (hetmem plan MODULE:FUNCTION --input 4x2048)"
            )
        raise PlanError(f"{path} is no Hugging Face configuration: {reason}") from error
    check_parameters(config, path)
    config.use_cache = False
    if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        config._experts_implementation = "grouped_mm"
    kind = _class_of(given.get("architectures") or [], config, path, transformers)
    try:
        made = _inputs_of(kind, config, batch, sequence)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise PlanError(f"there is no tensor of {batch} sequences of {sequence} tokens") from error

    def build() -> torch.nn.Module:
        try:
            with Offline(path):
                model: torch.nn.Module = kind._from_config(config, dtype=torch.float32)
        except PlanError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {_first_line(error)}"
            raise PlanError(f"{path}: no {kind.__name__} can be built as it says: {what}") from error
        _check_positions(model, path, sequence + new_tokens)
        return model

    return TracedCall(build, {**made, **(inputs or {})}, loss, mixed_precision)


def _first_line(error: Exception) -> str:
    """Return the first line of the message of `error`; with the second one, if that begins there."""
    lines = [*map(str.strip, str(error).splitlines()), ""]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0] or type(error).__name__


def _class_of(names: list[str], config: Any, path: Path, transformers: Any) -> Any:
    """Return the first of `names` that is a model of transformers; without names, the language model of the
    configuration's `model_type`."""
    for name in names:
        found = getattr(transformers, name, None) if name.isidentifier() else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if names:
        raise PlanError(
            f"{path}: transformers {transformers.__version__} has no model class {shown(names[0])}, which it names"
        )
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    auto: Any = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        raise PlanError(
            f"{path}: {config.model_type} is no language model and the file names no `architectures`: add the name of "
            f"the class there, or name a function that builds it (hetmem plan MODULE:FUNCTION --input 4x2048)"
        )
    return auto._model_mapping[type(config)]


def _inputs_of(kind: Any, config: Any, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Return the training inputs of a model of the class `kind`, guessed from its name and its main input's."""

    def whole(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.long, device="meta")

    main = getattr(kind, "main_input_name", "input_ids")
    labels = next((what for what, ends in _LABELS.items() if kind.__name__.endswith(tuple(ends.split()))), "")
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
    """Refuse a sequence longer than the table of learned positions, as no operator on `meta` does."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        known = isinstance(module, torch.nn.Embedding) and (last == "wpe" or "position_emb" in last)
        if known and sequence > module.num_embeddings:
            raise PlanError(
                f"{path}: the model has {module.num_embeddings} positions ({name}), expected a sequence of at most "
                f"so many tokens, got {sequence}: --sequence {module.num_embeddings}"
            )
