"""`make fake-gpu`: all stages of `make gpu` in small sizes, on the device that `device.cpp` adds to torch.

    OUT=DIRECTORY python -m tests.faked_driver [--stages facts,links] [--slow 10]
    python -m tests.faked_driver MODULE …       MODULE as `python -m` runs it, with the device

It needs g++ and no wheels of CUDA. Streams are late: what is asked for on one runs when somebody waits for it, and some
of it, at random (FAKED_SEED), before.
"""

from __future__ import annotations

import os
import runpy
import sys

REMARK = (
    "Not a GPU: torch's operators and hetmem's kernels run on the processor, behind the device that tests/faked_driver "
    "adds to torch. It shows that every stage runs and writes its numbers. It cannot show speed, of anything; CuPy and "
    "the launch of a kernel; errors of the driver, and which of them stick; page-locking; what the link and the copy "
    "engines do at once; bits of cuBLAS; compiled blocks; torch's own allocator; CUDA builds of FSDP2, DeepSpeed and "
    "torchao."
)


def main() -> int:
    """Run a module on the device, or without one all stages."""
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        return _on_the_device(words)
    from benchmarks.gpu.__main__ import main as run
    from tests.faked_driver import building

    os.environ.update(building.named())
    return run(["--small", "--slow", "10", "--seconds", "5400", *words], through="tests.faked_driver", remark=REMARK)


def _on_the_device(words: list[str]) -> int:
    """torch must find the library when it is loaded, so this process begins anew with it; those it starts need not."""
    device = os.environ["FAKED_DEVICE"]
    if os.environ.get("LD_PRELOAD") != device:
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, "LD_PRELOAD": device})
    del os.environ["LD_PRELOAD"]
    from tests.faked_driver.plugin import install_device

    install_device(seed=int(os.environ.get("FAKED_SEED", "0")))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a plugin may import what is not there, as on a GPU's machine
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
