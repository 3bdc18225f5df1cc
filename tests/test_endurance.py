"""A long training with everything on takes no more memory in the end than after its first steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import Forks

STEPS, SETTLED, EVERY = 2_000, 200, 100

PROGRAM = """
import gc, json, sys, torch, hetmem
from pathlib import Path
from hetmem.intercept import registry
from torch import nn

directory, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
width = 128

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(64, width), Block()
    def forward(self, ids):
        return self.blocks(self.table(ids)) @ self.table.weight.T

def anonymous_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

limits = hetmem.Budget(device="1MiB", host="768KiB", nvme="16MiB", nvme_dir=directory, device_chunks="256KiB")
options = {"chunk_bytes": "64KiB", "mixed_precision": torch.bfloat16, "activations": "offload"}
model = hetmem.manage(Net(), limits, device="sim", **options)
optimizer = hetmem.AdamW(model.parameters(), overlap="backward", max_grad_norm=None)
events, found = registry.of_module(model).runtime.events, []
for step in range(1, steps + 1):
    ids = torch.randint(0, 64, (2, 8 + step % 5))
    logits = model(ids).float()
    nn.functional.cross_entropy(logits.flatten(0, 1), (ids.flatten() + 1) % 64).backward()
    optimizer.step()
    optimizer.zero_grad()
    hetmem.progress(model)
    if step % every == 0:
        report = hetmem.report(model)
        str(report)
        report.save(directory / "report.html")
        hetmem.save(directory / "checkpoint", model, optimizer, extra={"step": step})
        assert hetmem.load(directory / "checkpoint", model, optimizer) == {"step": step}
        gc.collect()
        log_kib = sum(log.nbytes for log in events._logs) // 1024
        found.append((step, anonymous_kib(), log_kib))
links, activations = report.to_dict()["links"], report.to_dict()["activations"]
assert all(link["bytes"] > steps * 1024 for link in links.values()), links
assert activations["bytes"]["device_to_host"], activations
print(json.dumps(found))
"""


@pytest.mark.nightly
def test_memory_is_flat_through_2000_steps_with_everything_on(forks: Forks, tmp_path: Path) -> None:
    """Updates within the backward, 16-bit copies, activations and homes on NVMe, reports, checkpoints."""
    ended = forks.run(PROGRAM, str(tmp_path), str(STEPS), str(EVERY))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    before = next(taken - log for step, taken, log in found if step == SETTLED)
    most = max(taken - log for step, taken, log in found if step > SETTLED)
    assert most <= before + 1024, f"KiB beside the log grew by {most - before}: {found}"
    assert max(log for _, _, log in found) <= 8 * 1024
