"""Pretend CUDA: runs the CUDA paths of this project on a build of torch without CUDA.

``install()`` loads ``pretend_cuda.cpp``, which says what it does, and replaces what ``torch.cuda`` has of CUDA's own.
It must come before torch is imported, and lasts: tests use it in processes of their own (``environment``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

DEVICES, LIBRARY = "PRETEND_CUDA_DEVICES", "PRETEND_CUDA_LIBRARY"
MEMORY = 80 * 2**30  # bytes of each device
_SOURCE = Path(__file__).with_suffix(".cpp")


def why_not() -> str:
    """Why there can be no pretend devices here; empty where there can."""
    if "+cpu" not in version("torch"):
        return "this torch may be built for CUDA"
    return "" if shutil.which("g++") else "no g++ to build pretend_cuda.cpp with"


def environment(devices: int = 2) -> dict[str, str]:
    """Environment variables with which every Python process has so many GPUs from its start."""
    site = str(_SOURCE.parent / "cuda" / "site")
    path = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {LIBRARY: str(build()), DEVICES: str(devices), "PYTHONPATH": path}


def build() -> Path:
    """Compile the backend for this torch, once for all processes. Returns the library."""
    base = Path(find_spec("torch").origin).parent
    key = hashlib.sha256(_SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"pretend_cuda_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".partial")
            command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{base}/include", str(_SOURCE)]
            command += ["-o", str(partial), f"-L{base}/lib", "-lc10", "-ltorch_cpu"]
            subprocess.run(command, check=True)
            partial.replace(library)
    return library


def install() -> None:
    """Give this process the GPUs that the environment names."""
    assert "torch" not in sys.modules, "torch looks for CUDA once, when it is imported"
    devices = int(os.environ[DEVICES])
    for library in (*_libraries(), os.environ[LIBRARY]):
        backend = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    backend.pretend_take_waits.restype = ctypes.c_char_p
    sys.modules["pretend_cuda_backend"] = backend
    global torch  # for the functions that take the place of CUDA's own
    import torch

    cuda = torch.cuda
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_device": lambda: backend.pretend_current(),
        "set_device": lambda device: backend.pretend_set_current(_index(device)),
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _restore,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretend",
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="pretend", total_memory=MEMORY, uuid=f"pretend-{_index(device)}", multi_processor_count=1
        ),
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "synchronize": lambda device=None: backend.pretend_waited(b"synchronize"),
        "default_generators": tuple(_Generator(index) for index in range(devices)),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: _streams.get(_index(device)) or _default_stream(device),
        "default_stream": lambda device=None: _default_stream(device),
        "stream": _stream,
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_reserved"), lambda device=None: 0),
        "max_memory_allocated": lambda device=None: 2**20 * (1 + _index(device)),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    for module in ("torch.amp.autocast_mode", "torch.cuda.amp.common", "torch.amp.grad_scaler"):
        __import__(module)
        for name in ("amp_definitely_not_available", "_cuda_amp_not_available"):
            if hasattr(sys.modules[module], name):
                setattr(sys.modules[module], name, lambda: False)
    _install_data_parallel(torch.nn.parallel)
    torch.nn.parallel.data_parallel.__globals__["parallel_apply"] = _threads_in_turn


def _libraries() -> list[Path]:
    """What the backend needs of torch, and torch of the backend, in order."""
    folder = Path(find_spec("torch").origin).parent / "lib"
    return [*folder.glob("libgomp*"), folder / "libc10.so", folder / "libtorch_cpu.so"]


@contextlib.contextmanager
def counted_waits():
    """Counts what makes the host wait for a device inside the block, by its kind."""
    take_waits()
    counts: Counter = Counter()
    yield counts
    counts.update(take_waits())


def take_waits() -> dict[str, int]:
    """What has made the host wait since the last call; nothing is known of a real GPU."""
    if "pretend_cuda_backend" not in sys.modules:
        return {}
    text = sys.modules["pretend_cuda_backend"].pretend_take_waits().decode()
    return {why: int(count) for why, count in (line.split("\t") for line in text.splitlines())}


def _index(device) -> int:
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _exchange(device: int) -> int:
    before = torch.cuda.current_device()
    if device >= 0:
        torch.cuda.set_device(device)
    return before


def _restore(device: int) -> int:
    """A device without a context is not made current again, and gets none."""
    backend = sys.modules["pretend_cuda_backend"]
    before = backend.pretend_current()
    backend.pretend_set_current(device)
    return before


class _Generator:
    """A device's random numbers, which are not the host's. ``seeded`` counts how often they were seeded."""

    def __init__(self, index: int) -> None:
        self.index, self.seeded = index, 0
        self._backend = sys.modules["pretend_cuda_backend"]

    def manual_seed(self, seed: int) -> None:
        self.seeded += 1
        self._backend.pretend_seed(self.index, ctypes.c_uint64(seed))

    def get_state(self):
        state = torch.empty(self._backend.pretend_state_size(), dtype=torch.uint8)
        self._backend.pretend_get_state(self.index, ctypes.c_void_p(state.data_ptr()))
        return state

    def set_state(self, state) -> None:
        self._backend.pretend_set_state(self.index, ctypes.c_void_p(state.contiguous().data_ptr()))


class Stream:
    """Work is done when it is submitted; ``waited_for`` lists the streams that this one was told to wait for."""

    def __init__(self, device=None, **_) -> None:
        self.device, self.waited_for = torch.device("cuda", _index(device)), []
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        sys.modules["pretend_cuda_backend"].pretend_waited(b"synchronize")


_defaults: dict[int, Stream] = {}
_streams: dict[int, Stream] = {}


def _default_stream(device=None) -> Stream:
    return _defaults.setdefault(_index(device), Stream(device))


@contextlib.contextmanager
def _stream(stream: Stream | None):
    if stream is None:
        yield
        return
    # As the real one: on leaving, the device that was current before is made current, and gets a context.
    before, index = torch.cuda.current_device(), stream.device.index
    previous, _streams[index] = _streams.get(index), stream
    torch.cuda.set_device(index)
    try:
        yield
    finally:
        _streams.pop(index) if previous is None else _streams.update({index: previous})
        torch.cuda.set_device(before)


class Event:
    """A moment on the host's clock."""

    def __init__(self, enable_timing: bool = False, **_) -> None:
        self.timed, self.at = enable_timing, None

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        assert self.timed and end.timed, "both events are made with enable_timing=True"
        return (end.at - self.at) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        sys.modules["pretend_cuda_backend"].pretend_waited(b"synchronize")


def _threads_in_turn(modules, inputs, kwargs_tup=None, devices=None) -> list:
    """A thread for each GPU, as torch has it, one after the other: these GPUs draw with the host's one generator."""
    from concurrent.futures import ThreadPoolExecutor

    from torch.nn.parallel.parallel_apply import parallel_apply

    each = zip(modules, inputs, kwargs_tup or [{}] * len(modules), devices, strict=True)
    results = []
    for module, given, kwargs, device in each:
        with ThreadPoolExecutor(1) as thread:
            results += thread.submit(parallel_apply, [module], [given], [kwargs], [device]).result()
    return results


def _install_data_parallel(parallel) -> None:
    """What nn.DataParallel calls of CUDA's own, in plain operators."""

    def device(index: int):
        return torch.device("cuda", index) if index >= 0 else torch.device("cpu")

    def broadcast(tensors, devices, buffer_size=None):
        return [[t.to(device(_index(d))) for t in tensors] for d in devices]

    def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None):
        parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
        return tuple(part.to(device(_index(d))) for part, d in zip(parts, devices, strict=False))

    def gather(tensors, dim=0, destination=None, *, out=None):
        return torch.cat([t.to(device(_index(destination))) for t in tensors], dim)

    def reduce_add(inputs, destination=None, buffer_size=None):
        return tuple(sum(t.to(device(_index(destination))) for t in of_one) for of_one in zip(*inputs, strict=True))

    comm = parallel.comm
    comm.broadcast_coalesced, comm.scatter, comm.gather = broadcast, scatter, gather
    comm.reduce_add_coalesced = reduce_add
