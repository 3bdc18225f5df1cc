"""What the process really takes, read from outside: a budget is a limit, not a wish."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from pathlib import Path

DEVICE_MIB, HOST_MIB, SLACK_MIB = 32, 96, 32
LAYERS, WIDTH = 32, 1024  # 33.6 M parameters: 512 MiB of states, four times device + host

PROGRAM = f"""
import sys, torch, hetmem
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

budget = hetmem.Budget(device="{DEVICE_MIB}MiB", host="{HOST_MIB}MiB", nvme="2GiB", nvme_dir=sys.argv[1])

def warm_up():
    # Code that any training loads (torch imports its compiler with the first optimizer) is no part of the budget.
    model = hetmem.manage(nn.Linear(64, 64), hetmem.Budget(device="1MiB", host="4MiB"), device="sim")
    optimizer = hetmem.AdamW(model.parameters())
    model(torch.zeros(64, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

warm_up()
print("ready", flush=True)
sys.stdin.readline()
model = hetmem.managed(budget, device="sim")(Stack)()
optimizer = hetmem.AdamW(model.parameters(), lr=1e-3)
first = [p.detach().sum().item() for p in model.parameters()]
for step in range(3):
    loss = model(torch.ones(4, {WIDTH}))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert all(p.detach().sum().item() != before for p, before in zip(model.parameters(), first))
tiers = hetmem.report(model).to_dict()["tiers"]
assert tiers["device"]["peak_bytes"] <= {DEVICE_MIB} << 20, tiers
assert tiers["host"]["peak_bytes"] <= {HOST_MIB} << 20, tiers
assert tiers["nvme"]["peak_bytes"] >= {16 * LAYERS * WIDTH * WIDTH} - ({HOST_MIB} << 20), tiers
print("done", flush=True)
sys.stdin.readline()
"""


def anonymous_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def test_anonymous_memory_stays_within_device_and_host_budget(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    # Freed tensors go back to the system at once: what the C library keeps of them is nobody's memory.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before = anonymous_mib(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        peak, finished = 0.0, False

        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not finished:
                peak = max(peak, anonymous_mib(process.pid))
                finished = bool(selector.select(timeout=0.01))
        assert process.stdout.readline() == "done\n"
        process.stdin.close()
    assert process.returncode == 0
    grown = peak - before
    assert grown <= DEVICE_MIB + HOST_MIB + SLACK_MIB, f"{grown:.0f} MiB more than before"
    assert grown >= HOST_MIB / 2, f"only {grown:.0f} MiB: was anything trained?"
    assert not list(tmp_path.iterdir())
