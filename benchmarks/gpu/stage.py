"""One stage, in its process: `python -m benchmarks.gpu.stage NAME FOLDER SECONDS [small] [through=MODULE]`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

from benchmarks.gpu.notes import COMPLETE, Notes
from benchmarks.gpu.stages import chosen


def main() -> None:
    """Run the stage, and write how it ended."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product: the same bits each time
    name, folder, seconds, *more = sys.argv[1:]
    through = next((word.partition("=")[2] for word in more if word.startswith("through=")), "")
    notes = Notes(Path(folder), name, float(seconds), small="small" in more, through=through)
    (stage,) = chosen(name)
    try:
        getattr(importlib.import_module(stage.module), stage.function)(notes)
    except Exception as error:
        notes.line(name=name, failed=f"{type(error).__name__}: {error}"[:400], traceback=traceback.format_exc())
        notes.line(ended=f"failed: {type(error).__name__}")
        sys.exit(1)
    notes.line(ended=COMPLETE)
    sys.stdout.flush()
    os._exit(1 if notes.failures else 0)  # what is left on the device goes with the process, and needs no turn


if __name__ == "__main__":
    main()
