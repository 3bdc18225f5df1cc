"""Where the kernels run: CuPy on a GPU, or torch in their stead, and which of the two is here and why.

It compiles, keeps and launches kernels by name, and has what their launchers share; it does not know what any of them
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
"""Threads of every block; floats.cuh says the same."""

GROUP_ELEMENTS = 8
"""Elements a thread handles at a time; floats.cuh says the same."""

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""The dtypes of the kernels, by the name that floats.cuh gives them."""

MOST_BLOCKS = 2048
"""Eight blocks of 256 threads are what a multiprocessor holds: enough for 256 of them."""

HEADERS = ("floats.cuh",)
OPTIONS = (
    "--std=c++17",
    "-ftz=false",  # subnormals count
    "-fmad=false",  # a product is rounded before it is added to, unless __fmaf_rn says otherwise
    "-prec-div=true",
    "-prec-sqrt=true",
)
_SOURCES = Path(__file__).parent


class Backend(Protocol):
    """What a launcher needs. `native` is False where nothing can be launched and torch must do the work."""

    name: str
    reason: str
    native: bool

    def address(self, tensor: torch.Tensor, what: str) -> np.uint64:
        """Where the device finds the tensor's memory. Raises ValueError if it cannot reach it."""

    def launch(
        self, source: str, kernel: str, blocks: int, arguments: Sequence[np.generic], stream: torch.cuda.Stream | None
    ) -> None:
        """Start `kernel` of `source` on `stream` (None: torch's current one). Returns at once."""


def blocks_for(threads: int) -> int:
    """Return the grid for work of so many `threads`, at most what any device can hold at once."""
    return min(-(-threads // THREADS), MOST_BLOCKS)


def stream_for(stream: torch.cuda.Stream | None, *tensors: torch.Tensor) -> torch.cuda.Stream | None:
    """`stream`, or else the one that is current on the GPU of the first of `tensors` that lies on any: it need not be
    the current GPU, where a kernel would find nothing at these addresses. None if all are in host memory."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    return stream if stream is not None or device is None else torch.cuda.current_stream(device)


def check_flat(tensor: torch.Tensor, what: str, dtypes: Collection[torch.dtype], numel: int) -> None:
    """Refuse anything but contiguous memory of one of `dtypes` with at least `numel` elements, by a ValueError."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{what}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what}: expected contiguous memory, got {tuple(tensor.shape)}, strides {tensor.stride()}")
    if tensor.numel() < numel:
        raise ValueError(f"{what}: expected at least {numel} elements, got {tensor.numel()}")


class TorchBackend:
    """No kernels here: the launchers call the torch reference, which gives the same results more slowly."""

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
    """Kernels compiled by NVRTC at first use, kept in `cache_directory`, loaded and launched by CuPy.

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
        there = nullcontext() if device == torch.cuda.current_device() else torch.cuda.device(device)
        with there, self._external(stream, device):
            self._kernel(device, source, kernel)((blocks,), (THREADS,), tuple(arguments))

    def works(self, device: str = "cuda") -> bool:
        """Whether a kernel gets through compiler, driver and device, and gives the right bits. Waits for it."""
        numbers = torch.linspace(-4, 4, 2 * THREADS + 1, dtype=torch.float32, device=device)
        rounded = torch.zeros_like(numbers, dtype=torch.bfloat16)
        arguments = (np.int64(numbers.numel()), *(np.uint64(x.data_ptr()) for x in (numbers, rounded)))
        self.launch("cast.cu", "cast_f32_bf16", 1, arguments, None)
        return torch.equal(rounded, numbers.bfloat16())

    def _external(self, stream: torch.cuda.Stream, device: int) -> Any:
        """The torch stream as CuPy knows it: one for each handle, which is all that it goes by."""
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
    """Return the machine code of `source` for a device of that compute capability (90 is 9.0): what an earlier process
    left in `cache_directory`, if text, options and compiler are the same; else it is compiled, and kept there if that
    can be written."""
    nvrtc, texts = _compiler(), [(_SOURCES / name).read_text(encoding="utf-8") for name in (source, *HEADERS)]
    architecture = _target(capability, nvrtc)
    identity = repr((texts, architecture, OPTIONS, nvrtc.getVersion()))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    kept = None if cache_directory is None else cache_directory / f"{Path(source).stem}-{architecture}-{digest}.bin"
    if kept is not None:
        with suppress(OSError):
            return kept.read_bytes()
    program = nvrtc.createProgram(
        texts[0], source, [text.encode() for text in texts[1:]], list(map(str.encode, HEADERS))
    )
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *OPTIONS))
        code: bytes = (nvrtc.getPTX if architecture.startswith("compute_") else nvrtc.getCUBIN)(program)
    finally:
        nvrtc.destroyProgram(program)
    if kept is not None:
        with suppress(OSError):  # it is compiled again, by the next process
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, code)
    return code


def _compiler() -> Any:
    """Return NVRTC as CuPy binds it, which takes neither a driver nor a GPU. `cupy.RawModule` compiles too, but appends
    `-ftz=true` to whatever options it is given, and subnormals would be lost."""
    from cupy.cuda import nvrtc

    return nvrtc


def _target(capability: int, nvrtc: Any) -> str:
    """What to compile for: the device's own architecture, or the newest one known as PTX, which drivers finish."""
    known = sorted(nvrtc.getSupportedArchs())
    older = [number for number in known if number <= capability]
    if not older:
        raise RuntimeError(f"NVRTC {nvrtc.getVersion()} compiles for {known}, not for a device of {capability}")
    return f"sm_{capability}" if capability in known else f"compute_{older[-1]}"


@cache
def backend() -> Backend:
    """The kernels' home in this process: CuPy where a GPU, CuPy and an NVRTC that compiles for it are at hand and
    work, else torch; `.reason` says why."""
    if not torch.cuda.is_available():
        return TorchBackend("torch sees no GPU")
    try:
        home = CupyBackend(kernel_cache_directory())
    except Exception as error:  # also of a CuPy that another package has broken: torch gives the same results
        return TorchBackend(f"{type(error).__name__}: {error}")
    try:
        well = home.works()
    except Exception as error:  # of CuPy, the driver or the compiler, each with its own kinds
        return TorchBackend(f"{type(error).__name__}: {error} ({_versions()})")
    return home if well else TorchBackend(f"a kernel gave wrong bits here ({_versions()})")


def _versions() -> str:
    """Which CuPy is installed beside which torch: one for another CUDA imports well and launches nothing."""
    names = (f"cupy-cuda{major}x" for major in (11, 12, 13))
    found = [f"{name} {version}" for name in names if (version := _version_of(name))]
    wanted = (torch.version.cuda or "?").split(".")[0]
    return f"{', '.join(found) or 'CuPy'} beside torch for CUDA {torch.version.cuda}, which wants hetmem[cuda{wanted}]"


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
