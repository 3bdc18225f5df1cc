"""What a test of the store must not leave behind, and memory to move."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.memory.tested import Mapping


def random_memory(nbytes: int, seed: int) -> memoryview:
    view = Mapping(nbytes).buffer(0, nbytes)
    view[:] = random.Random(seed).randbytes(nbytes)
    return view


def open_files() -> Counter[str]:
    """What the process has open, without the descriptor that lists it."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return Counter(os.readlink(link) for link in links if os.path.islink(link))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    files, threads = open_files(), set(threading.enumerate())
    yield
    if open_files() - files:
        gc.collect()  # a test's own cycles, such as a caught exception, may hold its store
    assert open_files() - files == Counter()
    assert set(threading.enumerate()) - threads == set()
