"""Bytes over the host-to-device link in the demo, against the offline optimum of its own trace.

    python benchmarks/demo_bytes.py [--steps 6] [--device 18MiB]

Both count whole slots. Every step rewrites all weights, so the optimum serves each step from an empty device, with the
room that the trace left at every moment; a block in part may be given up, so it is a lower bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch

import hetmem
from benchmarks.optimum import fewest_bytes
from hetmem.intercept import registry
from hetmem.schedule.blocks import Fetch
from hetmem.schedule.trace import Tier


def load_demo() -> Any:
    """The example as a module."""
    path = Path(__file__).parent.parent / "examples" / "01_train_gpt.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec is not None
    assert spec.loader is not None
    import sys

    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo


def main() -> None:
    """Train, count, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="18MiB")
    options = parser.parse_args()
    demo = load_demo()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        budget = hetmem.Budget(device=options.device, host="96MiB", nvme="1GiB", nvme_dir=directory)
        model = hetmem.manage(demo.GPT(demo.GPTConfig()), budget, device="sim")
        optimizer = hetmem.AdamW(model.parameters(), **demo.ADAMW)
        runtime = registry.of_module(model).runtime
        traffic = runtime.traffic
        residency = traffic.residency
        slots = [0]
        carry_out = traffic.executor._carry_out

        def count(command: Any) -> None:
            if isinstance(command, Fetch) and command.target is Tier.DEVICE:
                slots[0] += residency.blocks[command.block].span
            carry_out(command)

        traffic.executor._carry_out = count
        batches = demo.random_batches(demo.read_corpus(demo.GPTConfig().vocabulary)[0], model.context, "cpu")
        for step in range(options.steps + 2):
            if step == 2:
                slots[0] = 0
            x, y = next(batches)
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        moments = [moment for trace in runtime.tracer.book.traces() for moment in trace.moments]
        uses = [moment.blocks for moment in moments]
        slot_bytes = runtime.memory.device_pool.slot_bytes
        room = [runtime.memory.device_slots(moment.non_model_bytes) * slot_bytes for moment in moments]
        sizes = {block: residency.blocks[block].span * slot_bytes for blocks in uses for block in blocks}
        optimum = fewest_bytes(uses, sizes, room)
        moved = slots[0] * slot_bytes / options.steps
        print("| device | moved per step | optimum | ratio |\n|---|---|---|---|")
        print(f"| {options.device} | {moved / 2**20:.1f} MiB | {optimum / 2**20:.1f} MiB | {moved / optimum:.3f} |")


if __name__ == "__main__":
    main()
