"""What the process really takes, read from outside: a budget is a limit, not a wish."""

from __future__ import annotations

import json
import os
import selectors
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import hetmem
from tests.forked import Forks
from tests.pairs import case

DEVICE_MIB, HOST_MIB, SLACK_MIB = 16, 48, 32
LAYERS, WIDTH = 16, 1024  # 16.8 M parameters: 256 MiB of states, four times device + host

PROGRAM = """
import json, os, struct, sys, torch, hetmem
from torch import nn

given = json.loads(%r)
layers, width, directory = given["layers"], given["width"], sys.argv[1]
checkpoint = os.path.join(directory, "checkpoint")

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()

def warm_up():
    # Code that any training loads (torch imports its compiler with the first optimizer) is no part of the budget.
    limits = hetmem.Budget(device="1MiB", host="4MiB", device_chunks="64KiB")  # updated by the kernels of the host
    model = hetmem.manage(nn.Linear(64, 64), limits, device="sim", **given["manage"])
    optimizer = hetmem.AdamW(model.parameters(), **given["optimizer"])
    for _ in range(2):
        model(torch.zeros(64, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hetmem.save(checkpoint, model, optimizer)
    hetmem.load(checkpoint, model, optimizer)
    os.remove(checkpoint)

def build():
    budget = hetmem.Budget(nvme_dir=directory, **given["budget"])
    return hetmem.managed(budget, device="sim", **given["manage"])(Stack)()

def train():
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-3, **given["optimizer"])
    first = [p.detach().sum().item() for p in model.parameters()]
    for step in range(3):
        model(torch.ones(4, width)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.detach().sum().item() != before for p, before in zip(model.parameters(), first))
    if given["saves"]:
        for _ in range(2):
            hetmem.save(checkpoint, model, optimizer)
            hetmem.load(checkpoint, model, optimizer)
        os.remove(checkpoint)

def load_weights():
    shape, nbytes = [width, width], 4 * width * width
    tensors = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [at * nbytes, (at + 1) * nbytes]}
        for at, name in enumerate(model.state_dict())
    }
    header = json.dumps(tensors).encode()
    with open(checkpoint, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in tensors:
            file.write(struct.pack("<f", 0.5) * (width * width))
    hetmem.load_weights(checkpoint, model)
    os.remove(checkpoint)
    assert all(p.min() == 0.5 == p.max() for p in model.parameters())

warm_up()
print("ready", flush=True)
sys.stdin.readline()
model = build()
load_weights() if given["loads"] else train()
tiers = hetmem.report(model).to_dict()["tiers"]
assert all(tiers[tier]["peak_bytes"] <= tiers[tier]["capacity_bytes"] for tier in tiers), tiers
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


def heap() -> list[range]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith("[heap]")]
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


def test_large_tensors_of_a_process_that_manages_a_model_are_not_in_the_heap() -> None:
    """Where their memory stays as they are freed. Some fill holes that others have left."""
    hetmem.manage(torch.nn.Linear(2, 2), hetmem.Budget(device="1MiB", host="1MiB"), device="sim")
    torch.empty(16 << 20, dtype=torch.uint8)  # once such a block is freed, glibc has smaller ones in the heap
    for size in range(17, 24):
        blocks = [torch.empty(1 << size, dtype=torch.uint8) for _ in range((128 << 20) >> size)]
        spans = heap()
        found = sum(block.data_ptr() in span for block in blocks for span in spans)
        assert found <= len(blocks) // 2, f"{found} of {len(blocks)} blocks of {1 << size >> 10} KiB are in the heap"


def _on_disk(layers: int = LAYERS, **options: object) -> dict[str, object]:
    """A model on three tiers."""
    budget = {"device": f"{DEVICE_MIB}MiB", "host": f"{HOST_MIB}MiB", "nvme": "1GiB"}
    given = {"layers": layers, "width": WIDTH, "budget": budget, "manage": {}, "optimizer": {}}
    return {**given, "saves": False, "loads": False, **options}


_IN_HOST_MEMORY = {"device": f"{DEVICE_MIB}MiB", "host": "272MiB"}
CONFIGURATIONS = {
    "in host memory": _on_disk(budget=_IN_HOST_MEMORY),
    "on NVMe": _on_disk(),
    "bf16": _on_disk(manage={"mixed_precision": "bf16"}),
    "overlapped": _on_disk(optimizer={"overlap": "backward"}),
    "saved and loaded": _on_disk(saves=True),
    "weights of four times the host budget": _on_disk(4 * HOST_MIB // 4, loads=True),
}


@pytest.mark.parametrize("name", [case(name, nightly=name != "on NVMe") for name in CONFIGURATIONS])
def test_anonymous_memory_stays_within_device_and_host_budget(name: str, forks: Forks, tmp_path: Path) -> None:
    given = CONFIGURATIONS[name]
    grown, in_files = run_watched(forks, PROGRAM % json.dumps(given), tmp_path)
    host_mib = int(given["budget"]["host"].removesuffix("MiB"))
    assert grown <= DEVICE_MIB + host_mib + SLACK_MIB, f"{grown:.0f} MiB more than before"
    assert grown >= host_mib / 2, f"only {grown:.0f} MiB: was anything trained?"
    if not (given["saves"] or given["loads"]):
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


EXISTING = """
import os, sys, torch, hetmem
from pathlib import Path
from torch import nn

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

def stack(width, layers):
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])

torch.ones(1 << 20)  # once such a block is freed, glibc has later ones in the heap
models = [stack(512, 48), stack(128, 768)]  # of 48 MiB each, in blocks that are mapped by now and in smaller ones
hetmem.manage(nn.Linear(64, 64), hetmem.Budget(device="1MiB", host="4MiB"), device="sim")
budget = hetmem.Budget(device="8MiB", host="8MiB", nvme="256MiB", nvme_dir=sys.argv[1])
for model in models:
    before = anonymous()
    hetmem.manage(model, budget, device="sim")
    left = 48 - (before - anonymous())
    assert left <= 8 + 12, f"{left:.0f} MiB are left of {len(model)} layers"

@hetmem.managed(budget, device="sim")
class Built(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = stack(128, 768)
        assert (grown := anonymous() - before) <= 8 + 8 + 8, f"{grown:.0f} MiB while it was built"

before = anonymous()
Built()
"""


def test_memory_that_parameters_leave_goes_back_to_the_system(forks: Forks, tmp_path: Path) -> None:
    ended = forks.run(EXISTING, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
