"""The CUDA device where a program does more with a GPU: graphs, another GPU, other streams, allocators and models."""

from __future__ import annotations

from tests.memory.fake_cuda import cuda

__all__ = ["cuda"]  # a fixture
