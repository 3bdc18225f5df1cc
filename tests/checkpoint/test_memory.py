"""Saving and loading take host memory for a few blocks, however large the model is: the system limits it."""

from __future__ import annotations

from pathlib import Path

from tests.forked import Forks

LAYERS, WIDTH, MIB = 32, 512, 1 << 20
STATE_MIB = 3 * LAYERS * WIDTH * WIDTH * 4 // MIB
ROOM_MIB = 24
"""For blocks and stacks of 1 MiB on four threads, and what the interpreter keeps meanwhile."""

PROGRAM = f"""
import resource, sys, threading, torch, hetmem, hetmem.checkpoint
from torch import nn

hetmem.checkpoint.layout.BLOCK_BYTES = {MIB}
threading.stack_size({MIB})

def build():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.sum()
    budget = hetmem.Budget(device="16MiB", host="32MiB", nvme="1GiB", nvme_dir=sys.argv[1])
    module = hetmem.managed(budget, device="sim")(Stack)()
    return module, hetmem.AdamW(module.parameters())

def data_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))

module, optimizer = build()
module(torch.ones(1, {WIDTH})).backward()
optimizer.step()
optimizer.zero_grad()
other, fresh = build()
assert hetmem.report(other).to_dict()["tiers"]["nvme"]["peak_bytes"] > {STATE_MIB // 2 * MIB}
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + {ROOM_MIB * MIB}, resource.RLIM_INFINITY))
try:
    torch.empty({STATE_MIB // 3 * MIB}, dtype=torch.uint8)
except RuntimeError:
    print("limited", flush=True)
path = sys.argv[1] + "/c"
hetmem.save(path, module, optimizer)
hetmem.load(path, other, fresh)
for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
    assert torch.equal(mine, theirs)
    assert torch.equal(optimizer.state[mine]["exp_avg_sq"], fresh.state[theirs]["exp_avg_sq"])
with torch.no_grad():
    for parameter in other.parameters():
        parameter.zero_()
hetmem.load_weights(path, other)
for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
    assert torch.equal(mine, theirs)
print("equal")
"""


def test_a_model_on_nvme_is_saved_and_loaded_within_a_few_blocks_of_memory(forks: Forks, tmp_path: Path) -> None:
    assert STATE_MIB >= 3 * ROOM_MIB
    done = forks.run(PROGRAM, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["limited", "equal"]
    assert (tmp_path / "c").stat().st_size >= STATE_MIB * MIB
