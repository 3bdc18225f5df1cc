"""Which sources of the kernels were last put to every test there is.

Sources that have faults in them, sanitisers and every architecture are for kernels that have changed. `make test-all`
runs those tests always and then writes what it saw to verified.json; `make test` runs them where that says otherwise.

As a program: prints the digest of the sources as they are; given that of an earlier time, it writes it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "hetmem" / "cuda", ROOT / "tests" / "cuda")
SEEN = Path(__file__).with_name("verified.json")
_SUFFIXES = {".cu", ".cuh", ".h", ".py"}


def digest(folders: Sequence[Path] = FOLDERS) -> str:
    """Of the names and texts of the kernels, of what launches them and of what tests them."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
            found.update(f"{folder.name}/{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()


def is_verified() -> bool:
    return SEEN.exists() and json.loads(SEEN.read_text())["sources"] == digest()


def main(earlier: Sequence[str]) -> None:
    from tests.cuda import nvrtc
    from tests.cuda.shim import GPP

    now = digest()
    if not earlier:
        print(now)
    elif earlier != [now]:
        sys.exit("the kernels or their tests have changed since the tests began: verified.json stays as it is")
    elif GPP is None or not nvrtc.library():
        sys.exit("without g++ those tests were left out: verified.json stays as it is")
    else:
        SEEN.write_text(json.dumps({"sources": now}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
