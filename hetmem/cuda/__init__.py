"""CUDA kernels that cast, update and sum (`*.cu`); `kernels` has their launchers, and the same work in torch.

`backend.backend()` says where they run and why. The same sources are compiled three ways: by g++ and compared with
torch on the CPU, by NVRTC without a GPU, and on a GPU (tests/cuda).
"""
