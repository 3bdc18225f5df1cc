"""A script that falls off its end while threads of hetmem work: the interpreter waits for them before it goes."""

from __future__ import annotations

from tests.forked import Forks

PROGRAM = """
import atexit, threading

@atexit.register  # before hetmem is imported, so after its own
def last():
    work()  # the interpreter still serves what asks late
    print("ran", len(ran), "alive", [each.name for each in threading.enumerate() if "hetmem" in each.name])

import torch
from hetmem.base.threads import Threads
from hetmem.cpu.workers import WorkerPool
from hetmem.memory.cuda_device import PageLocks
from hetmem.memory.host_memory import Mapping

class Cudart:
    def cudaHostRegister(self, address, nbytes, flags):
        return 0

    def cudaHostUnregister(self, address):
        busy()

def busy():
    matrix = torch.ones(600, 600)
    for _ in range(20):
        matrix = matrix @ matrix  # in C++ without the interpreter's lock, as torch's `cudaHostUnregister`
    ran.append(1)

def work():
    pool.begin([busy] * 2)

ran, pool, disk = [], WorkerPool(2), Threads(1, "hetmem-nvme-read")
locks = [PageLocks(Cudart(), Mapping(4096)) for _ in range(2)]
atexit.register(locks[1].end)  # a finalizer's: it does nothing, as the process ends
disk.start()
work()
locks[0].end()
assert len([each for each in threading.enumerate() if "hetmem" in each.name]) == 2
"""


def test_no_thread_of_hetmem_runs_when_the_interpreter_goes(forks: Forks) -> None:
    """It went while one was in C++, which ended the process: "terminate called without an active exception"."""
    ended = forks.run(PROGRAM)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["ran", "5", "alive", "[]"]
