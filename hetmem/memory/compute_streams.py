"""The streams that compute on a GPU, and memory of it that outlives whichever of them is current.

Knows torch's streams and its allocator; not slots, copies or chunks.
"""

from __future__ import annotations

import torch


class ComputeStreams:
    """The streams on which a program was seen to compute on one GPU. The default one is always among them.

    Note "pools": torch's allocator keeps memory for the stream that was current when it was taken, and hands it out
    there again as soon as it is given back. So all slots are taken from the default stream's, whatever stream is
    current: those of a copy or of the user's would be lost to everybody else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.default = torch.cuda.default_stream(device)
        self.seen: dict[torch.cuda.Stream, None] = {self.default: None}

    def current(self) -> torch.cuda.Stream:
        """The one that is current, from now on seen."""
        stream = torch.cuda.current_stream(self._device)
        self.seen[stream] = None
        return stream

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory that may still be in use by what the default stream was asked for earlier."""
        with torch.cuda.stream(self.default):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Memory that the current stream finds zeroed."""
        with torch.cuda.stream(self.default):
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        current = torch.cuda.current_stream(self._device)
        if current != self.default:
            current.wait_stream(self.default)
        return memory

    def last_use(self, memory: torch.Tensor) -> None:
        """Keep `memory`, which is given back next, from being reused before the work of other streams on it is done."""
        for stream in self.seen:
            if stream != self.default:
                memory.record_stream(stream)
