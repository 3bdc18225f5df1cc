"""What building a managed model takes beside the plain class, as processor time, in turns within one process.

    python benchmarks/building.py [--rounds 7] [--width 1024] [--layers 12] [--threads 1]

"decorated" is built by a class with `hetmem.managed`, "managed" by `hetmem.manage` of the plain one; all in host
memory. The least time of all rounds says most where other programs run. The first round, in which the machine gets its
memory, is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import hetmem


class Layers(nn.Sequential):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__(
            *(
                nn.Sequential(
                    *(nn.Linear(inside, outside) for inside, outside in ((width, 4 * width), (4 * width, width)))
                )
                for _ in range(layers)
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain = Layers(options.width, options.layers)
    budget = hetmem.Budget(device=sum(p.nbytes for p in plain.parameters()) // 2, host="64GiB")
    del plain

    class Decorated(Layers):
        pass

    decorated = hetmem.managed(budget, device="sim")(Decorated)
    builds: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: Layers(options.width, options.layers),
        "decorated": lambda: decorated(options.width, options.layers),
        "managed": lambda: hetmem.manage(Layers(options.width, options.layers), budget, device="sim"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in builds}
    for _ in range(options.rounds + 1):
        for name, build in builds.items():
            start = time.process_time()
            model = build()
            seconds[name].append(time.process_time() - start)
            if name != "plain":
                hetmem.release(model)
            del model
    for name, times in seconds.items():
        ratios = sorted(taken / plain for taken, plain in zip(times[1:], seconds["plain"][1:], strict=True))
        print(
            f"{name}: least {min(times[1:]):.2f} s, {min(times[1:]) / min(seconds['plain'][1:]):.2f} of plain; "
            f"by rounds "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
