"""Train adapters over a base that is kept as 4-bit codes: it takes 0.56 bytes an element at home and on the link.

    python examples/06_qlora.py                   LoRA of PEFT over a small Llama, in 16 bits and in nf4, side by side
    python examples/06_qlora.py --frozen mxfp4    another format: nf4, nf4-nested, mxfp4, fp8, int8
    python examples/06_qlora.py --check           beside plain torch over the decoded base: every loss and weight

The base has random weights, as nothing is fetched: for a real one build it from its config and fill it by
`hetmem.load_weights` behind `hetmem.manage`, which encodes 16-bit files as it reads them. Without a GPU the device is
simulated; its memory holds a third of the base. Needs transformers and peft.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

import hetmem
from hetmem.base.units import format_size
from hetmem.errors import BudgetError, DeviceOutOfMemoryError, ManageError

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may sum up in another order
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, LEARNING_RATE, DISTANCE = 256, 2e-3, 3


@dataclass(frozen=True)
class Sizes:
    """Of the base, and of what the adapters are trained on."""

    layers: int = 8
    width: int = 256
    rows: int = 1
    tokens: int = 32
    device_memory: str = "5MiB"
    host_memory: str = "64MiB"


def build(sizes: Sizes) -> Any:
    """A Llama in bfloat16 with adapters of rank 8 beside its linear layers."""
    import peft
    import transformers

    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=sizes.width,
            intermediate_size=3 * sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    ).bfloat16()
    base.gradient_checkpointing_enable()
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))


def batch(sizes: Sizes) -> torch.Tensor:
    """Sequences in which each token is that of some places before, plus 1."""
    torch.manual_seed(1)
    first = torch.randint(VOCABULARY, (sizes.rows, DISTANCE))
    parts = [(first + turn) % VOCABULARY for turn in range(-(-sizes.tokens // DISTANCE))]
    return torch.cat(parts, dim=-1)[..., : sizes.tokens]


def train(model: Any, optimizer: torch.optim.Optimizer, steps: list[torch.Tensor]) -> list[torch.Tensor]:
    """The loss of each step."""
    losses = []
    for tokens in steps:
        tokens = tokens.to(DEVICE)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def run(frozen: str | None, sizes: Sizes, steps: list[torch.Tensor], *, check: bool) -> list[torch.Tensor]:
    """Train with a base in the format `frozen`, or in 16 bits; print what it takes. The losses."""
    model = build(sizes)
    plain = copy.deepcopy(model) if check else None
    budget = hetmem.Budget(device=sizes.device_memory, host=sizes.host_memory)
    model = hetmem.manage(model, budget, frozen=frozen, chunk_bytes="384KiB")
    if plain is not None:
        plain.load_state_dict(model.state_dict())  # decoded values
        plain.to(DEVICE)
    losses = train(model, hetmem.AdamW(trained(model), lr=LEARNING_RATE), steps)
    report = hetmem.report(model).to_dict()
    crossed = report["links"]["host_to_device"]["bytes"] / len(steps)
    print(
        f"base in {frozen or 'bfloat16':10}  loss {losses[0]:.3f} to {losses[-1]:.3f}   host memory "
        f"{format_size(report['tiers']['host']['peak_bytes'])}, {format_size(crossed)} to the device a step"
    )
    if plain is not None:
        expected = train(plain, torch.optim.AdamW(trained(plain), lr=LEARNING_RATE, fused=True), steps)
        mine, its = model.state_dict(), plain.state_dict()
        if not all(map(torch.equal, losses, expected)) or not all(torch.equal(mine[n], its[n].cpu()) for n in its):
            raise AssertionError(f"{frozen}: a bit differs from plain torch over the decoded base")
        print(f"{len(losses)} losses and all weights equal those of plain torch over the decoded base")
    return losses


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> int:
    """Run the example; 0, 1 for a bit that differs, 2 for a budget or a format that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frozen", default="nf4", help="the format of the base; default: nf4")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps; default: 6")
    parser.add_argument("--check", action="store_true", help="train plain torch over the decoded base too, and compare")
    asked = parser.parse_args(arguments)
    if missing := [name for name in ("transformers", "peft") if find_spec(name) is None]:
        print(f"this example needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        return 0
    sizes = sizes or Sizes()
    try:
        for frozen in (None, asked.frozen):
            run(frozen, sizes, [batch(sizes)] * asked.steps, check=asked.check)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    except (BudgetError, DeviceOutOfMemoryError, ManageError) as error:
        print(f"06_qlora.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
