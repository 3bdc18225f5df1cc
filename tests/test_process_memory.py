"""What the process really takes, read from outside: a budget is a limit, not a wish."""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import sys
from contextlib import suppress
from pathlib import Path

from tests.forked import Forks

DEVICE_MIB, HOST_MIB, SLACK_MIB = 16, 48, 16
_M_MMAP_THRESHOLD = -3  # of malloc.h
LAYERS, WIDTH = 16, 1024  # 16.8 M parameters: 256 MiB of states, four times device + host

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

budget = hetmem.Budget(device="{DEVICE_MIB}MiB", host="{HOST_MIB}MiB", nvme="1GiB", nvme_dir=sys.argv[1])

def warm_up():
    # Code that any training loads (torch imports its compiler with the first optimizer) is no part of the budget.
    limits = hetmem.Budget(device="1MiB", host="4MiB", device_chunks="64KiB")  # updated by the kernels of the host
    model = hetmem.manage(nn.Linear(64, 64), limits, device="sim")
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
for step in range(2):
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


def in_files_mib(pid: int, directory: Path) -> float:
    """What open files in `directory` take of the disk; those of one inode, once."""
    found = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(descriptor).startswith(str(directory)):
                status = descriptor.stat()
                found[status.st_ino] = status.st_blocks * 512 / 2**20
    return sum(found.values())


def anonymous_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def watch(program: str, directory: Path) -> tuple[float, float]:
    """Run `program` in a fork, from its "ready" to its "done"; returns how many MiB its anonymous memory grew by, and
    how many its files in `directory` took, at most."""
    # Freed tensors go back to the system at once: what the C library keeps of them is nobody's memory.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    (read_there, write), (read, write_there) = os.pipe(), os.pipe()
    if not (pid := os.fork()):
        os.close(write)  # else its input never ends
        os.dup2(read_there, 0)
        os.dup2(write_there, 1)
        sys.stdin, sys.stdout, sys.argv = os.fdopen(0), os.fdopen(1, "w"), ["-c", str(directory)]
        exec(program, {"__name__": "__main__"})
        os._exit(0)
    os.close(write_there)
    said = os.fdopen(read)
    assert said.readline() == "ready\n"
    before = anonymous_mib(pid)
    os.write(write, b"go\n")
    peak, in_files, finished = 0.0, 0.0, False
    with selectors.DefaultSelector() as selector:
        selector.register(said, selectors.EVENT_READ)
        while not finished:
            peak = max(peak, anonymous_mib(pid))
            in_files = max(in_files, in_files_mib(pid, directory))
            finished = bool(selector.select(timeout=0.01))
    assert said.readline() == "done\n"
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    assert not list(directory.iterdir())
    return peak - before, in_files


def run_watched(forks: Forks, program: str, directory: Path) -> tuple[float, float]:
    """`watch` in a process that has torch and no thread."""
    watching = "import json, sys; from pathlib import Path; from tests.test_process_memory import watch; "
    watching += "print(json.dumps(watch(sys.argv[1], Path(sys.argv[2]))))"
    ended = forks.run(watching, program, str(directory))
    assert ended.returncode == 0, ended.stderr
    grown, in_files = json.loads(ended.stdout)
    return grown, in_files


def test_anonymous_memory_stays_within_device_and_host_budget(forks: Forks, tmp_path: Path) -> None:
    grown, in_files = run_watched(forks, PROGRAM, tmp_path)
    assert grown <= DEVICE_MIB + HOST_MIB + SLACK_MIB, f"{grown:.0f} MiB more than before"
    assert grown >= HOST_MIB / 2, f"only {grown:.0f} MiB: was anything trained?"
    assert in_files <= 16 * LAYERS


BUILDING = """
import os, sys, torch, hetmem
from pathlib import Path
from torch import nn

class Ones(nn.Linear):
    def reset_parameters(self):
        nn.init.ones_(self.weight)

class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Ones(512, 512, bias=False) for _ in range(layers))

def build(layers, host, nvme, device="16MiB"):
    budget = hetmem.Budget(device=device, host=f"{host}MiB", nvme=f"{nvme}MiB", nvme_dir=sys.argv[1])
    return hetmem.managed(budget, device="sim", chunk_bytes="1MiB")(type("Stack", (Stack,), {}))(layers)

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

hetmem.release(build(40, 20, 30))
before = anonymous()
whole_on_device = build(40, 64, 8, device="512MiB")
assert anonymous() - before < 60  # what it was built in is given back
open_files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
assert not [path for path in open_files if path.startswith(sys.argv[1])]  # host memory was enough
hetmem.release(whole_on_device)
del whole_on_device
print("ready", flush=True)
sys.stdin.readline()
model = build(%d, %d, %d)
assert all(p.min() == 1 for p in model.parameters())
print("done", flush=True)
sys.stdin.readline()
"""


def test_building_a_model_of_nine_tenths_of_host_memory_and_nvme_takes_no_more(forks: Forks, tmp_path: Path) -> None:
    layers, host_mib, nvme_mib = 115, 43, 85  # a layer is 1 MiB
    grown, in_files = run_watched(forks, BUILDING % (layers, host_mib, nvme_mib), tmp_path)
    assert grown <= host_mib + 8, f"{grown:.0f} MiB more than before"
    assert in_files <= nvme_mib + 1
    assert grown + in_files >= layers
