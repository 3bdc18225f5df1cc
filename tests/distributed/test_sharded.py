"""`hetmem.AdamW(budget=…)` over `fully_shard`: the bits of torch's fused AdamW there, on gloo ranks of this machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import Forks

TORCH = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")


@pytest.fixture(scope="module")
def ranks(forks: Forks) -> Iterator[Forks]:
    with forks.that_import(*TORCH) as made:
        yield made


def run(ranks: Forks, world: int, folder: Path, *stories: str) -> None:
    program = "import sys; from tests.distributed.ranks import main; main(int(sys.argv[1]), *sys.argv[2:])"
    environment = {"LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    ended = ranks.run(program, str(world), str(folder), *stories, environment=environment, seconds=250)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]


@pytest.mark.nightly
def test_two_ranks_have_the_bits_of_torchs_optimizer_and_their_states_go_to_one(ranks: Forks, tmp_path: Path) -> None:
    run(ranks, 2, tmp_path, "float32", "mixed offloaded", "overlap offloaded", "norm", "odd", "save")
    run(ranks, 1, tmp_path, "load")


@pytest.mark.nightly
def test_any_number_of_ranks_and_every_policy(ranks: Forks, tmp_path: Path) -> None:
    """All ranks find one norm. It is that of any number of ranks until weights differ: torch's fused AdamW, which each
    is compared with, has other bits for the last elements of a shard."""
    run(ranks, 2, tmp_path, "float32 offloaded", "mixed", "overlap", "norm", "save")
    run(ranks, 4, tmp_path, "load", "float32", "float32 offloaded", "mixed", "mixed offloaded", "overlap offloaded")
    run(ranks, 4, tmp_path, "norm", "odd", "save")
    run(ranks, 1, tmp_path, "load")
    run(ranks, 2, tmp_path, "load")
    norms = {world: [ast.literal_eval(f.read_text()) for f in tmp_path.glob(f"norms of {world} *")] for world in (2, 4)}
    for world, found in norms.items():
        assert found == [found[0]] * world
    assert norms[4][0][:1] == pytest.approx(norms[2][0][:1], rel=1e-14)


@pytest.mark.nightly
def test_a_rank_that_is_killed_is_noticed_and_leaves_nothing(ranks: Forks, tmp_path: Path) -> None:
    run(ranks, 2, tmp_path, "killed")
    assert not list(tmp_path.glob("nvme*/*"))
