"""Fine-tune a pretrained Hugging Face model that is larger than the device.

    python examples/03_finetune_transformers.py                       a tiny Llama that it makes itself: some seconds
    python examples/03_finetune_transformers.py --model DIR --text notes.txt --output tuned \\
        --batch 4 --sequence 2048 --device-memory 20GiB --host-memory 120GiB --nvme-memory 0

DIR is what `huggingface_hub.snapshot_download` or `save_pretrained` leaves: a config and weights in safetensors. The
model is built with its parameters at home from the start and filled file by file, so host memory never holds it twice.
What is trained is saved so that `from_pretrained` reads it. Needs `transformers` ≥ 5.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights

import hetmem
from hetmem.errors import HetmemError

SEED, STEPS, SEQUENCE, LEARNING_RATE = 20, 20, 64, 1e-3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOMENTS = {"float32": None, "bfloat16": torch.bfloat16, "8bit": "8bit"}
TEXT = "To train a model is to be wrong a little less often. " * 40


def tiny_model(directory: Path) -> None:
    """A Llama that has learned nothing, over bytes, saved in bfloat16 and in several files as large models are."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="500KB")


def managed_model(directory: Path, budget: hetmem.Budget) -> transformers.PreTrainedModel:
    """The model in `directory`: float32 masters on the tiers of `budget`, bfloat16 copies that compute."""
    config = transformers.AutoConfig.from_pretrained(directory)

    base = getattr(transformers, config.architectures[0])
    # Not `from_pretrained`: that would need all of the model in host memory. Here parameters go home one by one. The
    # class has the name of its base, as transformers goes by it.
    named = type(base.__name__, (base,), {"__module__": base.__module__})
    managed = hetmem.managed(budget, mixed_precision=torch.bfloat16)(named)
    with no_init_weights():  # they are about to be read
        model: transformers.PreTrainedModel = managed(config)
    hetmem.load_weights(directory, model)
    # Activations are recomputed in the backward; the method has a new name since transformers 5.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def batches(directory: Path, text: str, batch: int, sequence: int) -> list[Tensor]:
    """`text` as int64 [batch, sequence] each: the tokens of the model's tokenizer, or bytes."""
    if (directory / "tokenizer_config.json").exists():
        tokens = transformers.AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    else:
        tokens = list(text.encode())
    size = batch * sequence
    if len(tokens) < size:
        raise ValueError(f"the text has {len(tokens)} tokens, expected at least {size}: a batch of {batch}x{sequence}")
    return list(torch.tensor(tokens[: len(tokens) // size * size]).view(-1, batch, sequence))


def train(model: transformers.PreTrainedModel, rows: Sequence[Tensor], steps: int, **how: Any) -> list[float]:
    """Next-token training with updates behind the backward, in the bits of plain torch; the losses. `how` are options
    of `hetmem.AdamW`."""
    optimizer = hetmem.AdamW(model.parameters(), lr=LEARNING_RATE, overlap="backward", **how)
    losses = []
    for step in range(steps):
        row = rows[step % len(rows)].to(DEVICE)
        loss = model(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1:4}  loss {losses[-1]:.3f}", flush=True)
    return losses


def save(model: transformers.PreTrainedModel, directory: Path) -> None:
    """What `from_pretrained` reads, streamed: weights in float32, and the config."""
    directory.mkdir(parents=True, exist_ok=True)
    hetmem.save(directory / "model.safetensors", model)
    model.config.save_pretrained(directory)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a pretrained model (default: a tiny one, made here)")
    parser.add_argument("--text", type=Path, help="what it learns, UTF-8 (default: a sentence)")
    parser.add_argument("--output", type=Path, help="where the result is saved (default: nowhere)")
    parser.add_argument("--report", type=Path, help="where the report of the last step is written, as .html")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=1, help="rows of a step (default: 1)")
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help=f"tokens of a row (default: {SEQUENCE})")
    parser.add_argument("--moments", default="float32", choices=list(MOMENTS))
    parser.add_argument("--device-memory", default="8MiB")
    parser.add_argument("--host-memory", default="24MiB")
    parser.add_argument("--nvme-memory", default="64MiB")
    parser.add_argument("--nvme-dir", help="default: a temporary directory")
    return parser.parse_args(arguments)


def budget_of(options: argparse.Namespace, scratch: str) -> hetmem.Budget:
    """On a GPU only the model's part of it is limited: cuBLAS alone takes 32 MiB for each thread that multiplies."""
    limited = "device" if DEVICE == "cpu" else "device_chunks"
    sizes = {limited: options.device_memory, "host": options.host_memory, "nvme": options.nvme_memory}
    return hetmem.Budget(**sizes, nvme_dir=options.nvme_dir or scratch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 0, or 2 with a message where something is missing."""
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or Path(scratch, "tiny")
        try:
            if options.model is None:
                tiny_model(directory)
            model = managed_model(directory, budget_of(options, scratch))
            text = TEXT if options.text is None else options.text.read_text("utf-8")
            rows = batches(directory, text, options.batch, options.sequence)
            train(model, rows, options.steps, moments=MOMENTS[options.moments])
            report = hetmem.report(model)
            print(report)
            if options.report is not None:
                report.save(options.report)
            if options.output is not None:
                save(model, options.output)
        except (HetmemError, OSError, ValueError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
