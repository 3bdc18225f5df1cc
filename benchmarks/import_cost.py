"""What `import hetmem` costs over `import torch`: python benchmarks/import_cost.py

Fresh interpreters in pairs, one after the other, so a slow spell of the machine meets both halves of a pair: one
imports torch, the other torch and then hetmem. Files are in the page cache (the first pair is thrown away),
and byte code is cached as it is for every user: compiling 40 modules anew takes 60 ms.

A full collection of the 170,000 objects that torch makes takes 70 ms and falls into one import or the next by chance:
it is done between the two, outside of what is measured.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

PAIRS = 7
REPOSITORY = Path(__file__).parents[1]

TIMED = """
import time
begin = time.perf_counter()
import torch
after_torch = time.perf_counter()
import gc
gc.collect()
collected = time.perf_counter()
{then}
print(after_torch - begin, time.perf_counter() - collected, torch.__version__)
"""


def import_seconds(then: str) -> tuple[float, float, str]:
    """Seconds of `import torch`, seconds of `then` after it, torch's version."""
    command = [sys.executable, "-c", TIMED.format(then=then)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    output = subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True).stdout
    torch_seconds, then_seconds, version = output.split()
    return float(torch_seconds), float(then_seconds), version


def line(name: str, seconds: list[float]) -> str:
    median, least, most = (1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{name:<38} {median:8.1f} ms   ({least:.1f} to {most:.1f})"


def main() -> None:
    torch_alone, hetmem_after, differences = [], [], []
    for pair in range(PAIRS + 1):
        alone_seconds, _, version = import_seconds("")
        torch_seconds, hetmem_seconds, _ = import_seconds("import hetmem")
        if pair == 0:
            continue
        torch_alone.append(alone_seconds)
        hetmem_after.append(hetmem_seconds)
        differences.append(torch_seconds + hetmem_seconds - alone_seconds)
    print(f"Python {platform.python_version()}, torch {version}, {platform.machine()}: median of {PAIRS} pairs")
    print(line("import torch", torch_alone))
    print(line("import hetmem, torch being there", hetmem_after))
    print(line("torch and hetmem less torch, by pair", differences))


if __name__ == "__main__":
    main()
