"""Chooses where the kernels run, CuPy on a GPU or torch in their place, and says why.

It compiles, caches and launches kernels by name, with the checks that launchers share; it does not know what a kernel
computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hetmem.base.config import kernel_cache_directory
from hetmem.base.whole_files import write_whole

THREADS = 256
"""Threads of every block; as in floats.cuh."""

GROUP_ELEMENTS = 8
"""Elements a thread handles at a time; as in floats.cuh."""

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""The dtypes of the kernels and their names in floats.cuh."""

MOST_BLOCKS = 2048
"""A multiprocessor holds eight blocks of 256 threads: enough for 256 multiprocessors."""

HEADERS = ("floats.cuh",)
OPTIONS = (
    "--std=c++17",
    "-ftz=false",  # keep subnormals
    "-fmad=false",  # no contraction: only __fmaf_rn fuses
    "-prec-div=true",
    "-prec-sqrt=true",
)
_SOURCES = Path(__file__).parent


class Backend(Protocol):
    """Launches kernels. `native` is False if nothing can be launched and torch must do the work."""

    name: str
    reason: str
    native: bool

    def address(self, tensor: torch.Tensor, what: str) -> np.uint64:
        """Return the device address of the tensor's memory. Raises ValueError if the device cannot reach it."""

    def launch(
        self, source: str, kernel: str, blocks: int, arguments: Sequence[np.generic], stream: torch.cuda.Stream | None
    ) -> None:
        """Start `kernel` of `source` on `stream` (None: torch's current one). Returns at once."""


def blocks_for(threads: int) -> int:
    """Return the grid size for work of so many `threads`, at most what any device can hold at once."""
    return min(-(-threads // THREADS), MOST_BLOCKS)


def stream_for(stream: torch.cuda.Stream | None, *tensors: torch.Tensor) -> torch.cuda.Stream | None:
    """Return `stream`, or the current stream of the GPU of the first of `tensors` that is on one: that need not be the
    current GPU, whose kernels could not reach these addresses. None if all are in host memory."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    return stream if stream is not None or device is None else torch.cuda.current_stream(device)


def check_flat(tensor: torch.Tensor, what: str, dtypes: Collection[torch.dtype], numel: int) -> None:
    """Raise ValueError for anything but contiguous memory of one of `dtypes` with at least `numel` elements."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{what}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what}: expected contiguous memory, got {tuple(tensor.shape)}, strides {tensor.stride()}")
    if tensor.numel() < numel:
        raise ValueError(f"{what}: expected at least {numel} elements, got {tensor.numel()}")


class TorchBackend:
    """Has no kernels: the launchers call the torch reference, which gives the same results more slowly."""

    name = "torch"
    native = False

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def address(self, tensor: torch.Tensor, what: str) -> np.uint64:
        address: np.uint64 = np.uint64(tensor.data_ptr())
        return address

    def launch(
        self, source: str, kernel: str, blocks: int, arguments: Sequence[np.generic], stream: torch.cuda.Stream | None
    ) -> None:
        raise AssertionError(f"{kernel} was to be launched without a GPU: {self.reason}")


class CupyBackend:
    """Launches by CuPy the kernels that NVRTC compiles at first use and `cache_directory` keeps.

    A launch allocates nothing and never waits for the device. May be used from several threads.
    """

    name = "cupy"
    native = True

    def __init__(self, cache_directory: Path | None) -> None:
        import cupy

        self.reason = f"CuPy {cupy.__version__}"
        self._cupy: Any = cupy
        self._cache_directory = cache_directory
        self._modules: dict[tuple[int, str], Any] = {}
        self._kernels: dict[tuple[int, str, str], Any] = {}
        self._streams: dict[tuple[int, int], Any] = {}

    def address(self, tensor: torch.Tensor, what: str) -> np.uint64:
        if tensor.device.type != "cuda" and not tensor.is_pinned():
            raise ValueError(f"{what} must be on the GPU or in pinned memory, got unpinned memory on {tensor.device}")
        address: np.uint64 = np.uint64(tensor.data_ptr())
        return address

    def launch(
        self, source: str, kernel: str, blocks: int, arguments: Sequence[np.generic], stream: torch.cuda.Stream | None
    ) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        device = stream.device.index
        on_device = nullcontext() if device == torch.cuda.current_device() else torch.cuda.device(device)
        with on_device, self._external(stream, device):
            self._kernel(device, source, kernel)((blocks,), (THREADS,), tuple(arguments))

    def works(self, device: str = "cuda") -> bool:
        """Return whether a kernel compiles, runs and gives the right bits. Waits for it."""
        numbers = torch.linspace(-4, 4, 2 * THREADS + 1, dtype=torch.float32, device=device)
        rounded = torch.zeros_like(numbers, dtype=torch.bfloat16)
        arguments = (np.int64(numbers.numel()), *(np.uint64(x.data_ptr()) for x in (numbers, rounded)))
        self.launch("cast.cu", "cast_f32_bf16", 1, arguments, None)
        return torch.equal(rounded, numbers.bfloat16())

    def _external(self, stream: torch.cuda.Stream, device: int) -> Any:
        """Return CuPy's object for a torch stream, one for each handle."""
        key = stream.cuda_stream, device
        found = self._streams.get(key)
        if found is None:
            found = self._streams[key] = self._cupy.cuda.Stream.from_external(stream)
        return found

    def _kernel(self, device: int, source: str, kernel: str) -> Any:
        key = device, source, kernel
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self._module(device, source).get_function(kernel)
        return found

    def _module(self, device: int, source: str) -> Any:
        found = self._modules.get((device, source))
        if found is None:
            major, minor = torch.cuda.get_device_capability(device)
            found = self._cupy.cuda.Module()
            found.load(compiled(source, 10 * major + minor, self._cache_directory))
            self._modules[device, source] = found
        return found


def compiled(source: str, capability: int, cache_directory: Path | None) -> bytes:
    """Return the machine code of `source` for a device of that compute capability (90 is 9.0): from `cache_directory`,
    if an earlier process compiled the same text with the same options and compiler; else it is compiled, and cached
    there if that is writable."""
    nvrtc, texts = _compiler(), [(_SOURCES / name).read_text(encoding="utf-8") for name in (source, *HEADERS)]
    architecture = _target(capability, nvrtc)
    identity = repr((texts, architecture, OPTIONS, nvrtc.getVersion()))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    cached = None if cache_directory is None else cache_directory / f"{Path(source).stem}-{architecture}-{digest}.bin"
    if cached is not None:
        with suppress(OSError):
            return cached.read_bytes()
    program = nvrtc.createProgram(
        texts[0], source, [text.encode() for text in texts[1:]], list(map(str.encode, HEADERS))
    )
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *OPTIONS))
        code: bytes = (nvrtc.getPTX if architecture.startswith("compute_") else nvrtc.getCUBIN)(program)
    finally:
        nvrtc.destroyProgram(program)
    if cached is not None:
        with suppress(OSError):  # the next process will compile it again
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_whole(cached, code)
    return code


def _compiler() -> Any:
    """Return CuPy's binding of NVRTC, which needs neither a driver nor a GPU. `cupy.RawModule` compiles too, but
    appends `-ftz=true` to all options, which would flush subnormals."""
    from cupy.cuda import nvrtc

    return nvrtc


def _target(capability: int, nvrtc: Any) -> str:
    """Return the device's own architecture, or the newest known one as PTX, which drivers compile further."""
    known = sorted(nvrtc.getSupportedArchs())
    older = [number for number in known if number <= capability]
    if not older:
        raise RuntimeError(f"NVRTC {nvrtc.getVersion()} compiles for {known}, not for a device of {capability}")
    return f"sm_{capability}" if capability in known else f"compute_{older[-1]}"


@cache
def backend() -> Backend:
    """Return the backend of this process: CuPy if a GPU, CuPy and a suitable NVRTC are installed and work, else torch;
    `.reason` says why."""
    if not torch.cuda.is_available():
        return TorchBackend("torch sees no GPU")
    try:
        found = CupyBackend(kernel_cache_directory())
    except Exception as error:  # of any kind, as of a broken CuPy: torch gives the same results
        return TorchBackend(f"{type(error).__name__}: {error}")
    try:
        well = found.works()
    except Exception as error:  # of CuPy, the driver or the compiler, of any kind
        return TorchBackend(f"{type(error).__name__}: {error} ({_versions()})")
    return found if well else TorchBackend(f"a kernel gave wrong bits here ({_versions()})")


def _versions() -> str:
    """Return which CuPy is installed beside which torch: one for another CUDA can be imported but launches nothing."""
    names = (f"cupy-cuda{major}x" for major in (11, 12, 13))
    found = [f"{name} {version}" for name in names if (version := _version_of(name))]
    wanted = (torch.version.cuda or "?").split(".")[0]
    return f"{', '.join(found) or 'CuPy'} beside torch for CUDA {torch.version.cuda}, which wants hetmem[cuda{wanted}]"


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
