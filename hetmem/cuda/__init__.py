"""CUDA kernels that cast, step and sum up; each with a launcher and a torch reference.

`backend.backend()` says where they run and why. Each `*.cu` holds kernels, the module of the same name their launchers;
`reference` does the same work in torch. The same sources are compiled
three ways: by g++ and compared with torch on the CPU, by NVRTC without a GPU, and on a GPU (tests/cuda).
"""
