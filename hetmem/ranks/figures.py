"""What each rank tells the others of its time and bytes, for the report of any of them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hetmem.base.units import format_seconds
from hetmem.ranks.words import Words

PLACES = ("backward", "step", "elsewhere")
"""Where a rank waits for others."""
LINKS = ("host_to_device", "device_to_host")
_MANY = 10
"""From so many backwards on a remark says which rank is the last one."""
_MOST_SHARE, _WAITS_SHARE = 0.7, 0.05
"""Of backwards that one rank ends last, and of the time that others wait: from both on a remark says so."""


class Figures:
    """The figures of `rank`, and, in `words`, those of the others."""

    def __init__(self, words: Words, rank: int) -> None:
        self._words, self._rank = words, rank
        self._stepped = 0

    def waited(self, place: str, seconds: float) -> None:
        """Add `seconds` of a wait at `place`, which those are the reason for that do not wait themselves."""
        nanoseconds, words = int(seconds * 1e9), self._words
        at = next((index for index, name in enumerate(PLACES) if place.endswith(name)), len(PLACES) - 1)
        words.waited[self._rank, at] += nanoseconds
        words.waited_for[self._rank] += (words.waiting == 0) * nanoseconds

    def ended_backward(self, number: int) -> None:
        """Note that this rank has computed its part of backward `number`, perhaps as the last one."""
        computed = self._words.computed
        computed[self._rank] = number
        self._words.last[self._rank] += bool((computed >= number).all())

    def began_step(self, moved: Mapping[str, int]) -> None:
        """Note that a step begins, after which each link has `moved` so many bytes in all."""
        now, words = time.perf_counter_ns(), self._words
        if self._stepped:
            words.step_nanoseconds[self._rank] = now - self._stepped
        self._stepped = now
        words.moved[self._rank] = [moved[link] for link in LINKS]

    def exchanged(self, nbytes: int, *, beside: bool) -> None:
        """Add `nbytes` of sums that came from other machines; `beside`: while this rank computed a backward."""
        self._words.exchanged[self._rank] += [nbytes, nbytes * beside]

    def first_batch(self, tensors: Iterable[Any]) -> None:
        """Tell the others a hash of the `tensors` of the first forward, once."""
        if not self._words.batch[self._rank]:
            found = 1
            for tensor in tensors:
                data = tensor.detach().cpu().contiguous().reshape(-1)
                found = zlib.crc32(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"", found)
            self._words.batch[self._rank] = found or 1

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each rank: seconds, counts and bytes so far, of a step those of the last one."""
        words = self._words
        return [
            {
                "rank": rank,
                "steps": int(words.steps[rank]),
                "backwards": int(words.entered[rank]),
                "step_seconds": int(words.step_nanoseconds[rank]) / 1e9,
                "wait_seconds": {name: int(words.waited[rank, at]) / 1e9 for at, name in enumerate(PLACES)},
                "waited_for_seconds": [
                    0.0 if other == rank else int(found) / 1e9 for other, found in enumerate(words.waited_for[rank])
                ],
                "last_in_backwards": int(words.last[rank]),
                "bytes": {link: int(words.moved[rank, at]) for at, link in enumerate(LINKS)},
                "network_bytes": int(words.exchanged[rank, 0]),
                "network_bytes_beside_backwards": int(words.exchanged[rank, 1]),
            }
            for rank in range(len(words.steps))
        ]

    def remarks(self) -> list[str]:
        """Return sentences on what the figures show."""
        words, rows, found = self._words, self.rows(), []
        slowest = max(rows, key=lambda row: row["last_in_backwards"])
        share = slowest["last_in_backwards"] / max(1, slowest["backwards"])
        steps = max(1, slowest["steps"]) * slowest["step_seconds"]
        waits = max(row["waited_for_seconds"][slowest["rank"]] for row in rows)
        if slowest["backwards"] >= _MANY and share >= _MOST_SHARE and waits >= _WAITS_SHARE * steps:
            found.append(
                f"Rank {slowest['rank']} is the last one in {share:.0%} of backwards, and others have waited "
                f"{format_seconds(waits)} for it: has it more to compute, or fewer cores?"
            )
        if (words.batch == words.batch[0]).all() and words.batch[0]:
            found.append("All ranks got the same first batch: is the sampler distributed?")
        return found
