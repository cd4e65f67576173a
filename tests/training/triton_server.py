"""A Triton server on the loopback interface, from the folder that ``triton_install/install`` has made."""

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from commandline import free_port

from launchers.meeting import LOOPBACK

BACKEND = Path(__file__).resolve().parent / "triton_install" / "onnxruntime"
START_S = 180.0
VARIABLE = "TRITON_SERVER"
_STUB = Path("backends", "python", "triton_python_backend_stub")
# What the server's Python must not take from this environment: numpy 2, and what may not fit a CPU torch.
NOT_FROM_HERE = ("numpy", "torchvision")


class TritonServer:
    """A server that has some repositories loaded. ``http``, ``grpc``: HOST:PORT."""

    def __init__(self, repositories: Sequence[Path], folder: Path) -> None:
        home = installed()
        server = home / "pytriton" / "tritonserver"
        backends = folder / "backends"
        shutil.copytree(server / "backends" / "python", backends / "python")
        # The backend's own Python ignores PYTHONPATH and finds what lies beside the backend.
        packages = {path.name: path for path in Path(torch.__file__).parent.parent.iterdir()}
        packages = {name: path for name, path in packages.items() if not name.startswith(NOT_FROM_HERE)}
        for name, path in {**packages, **{path.name: path for path in (home / "packages").iterdir()}}.items():
            (backends / "python" / name).symlink_to(path)
        (backends / "onnxruntime").symlink_to(BACKEND)
        ports = {name: free_port() for name in ("http", "grpc", "metrics")}
        self.http, self.grpc, self._metrics = (f"{LOOPBACK}:{port}" for port in ports.values())
        command = [
            str(server / "bin" / "tritonserver"),
            *(f"--model-repository={repository}" for repository in repositories),
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name=triton-{os.getpid()}-{ports['http']}",
            # By default 30: on a busy machine, too little to import torch and transformers for the first time.
            f"--backend-config=python,stub-timeout-seconds={START_S:.0f}",
            "--disable-auto-complete-config",
            *(f"--{name}-address={LOOPBACK}" for name in ports),
            *(f"--{name}-port={port}" for name, port in ports.items()),
        ]
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(home / "nvidia_pytriton.libs"),
            "TRITON_PACKAGES": str(home / "packages"),
            "OMP_NUM_THREADS": "1",
            "PATH": str(_home_of_library(server / _STUB) / "bin"),  # where the server's Python looks for its modules
        }
        self.log = folder / "triton.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.log.read_text()
                if "error while loading shared libraries" in said:
                    pytest.skip(f"tritonserver cannot start: {said.strip()[-200:]}")
                wrong = [line for line in said.splitlines() if line.startswith("E")] or [said[-5000:]]
                raise AssertionError("\n".join([f"tritonserver was not ready within {START_S} s:", *wrong]))
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=5).status == 200
        except (urllib.error.URLError, OSError):
            return False

    def metric(self, name: str, model: str) -> float:
        """A number of the server's own metrics."""
        text = urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10).read().decode()
        (value,) = re.findall(rf'^{name}{{model="{model}",version="1"}} (\S+)$', text, flags=re.MULTILINE)
        return float(value)

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def installed() -> Path:
    """Where the server is; skips the test where there is none."""
    home = os.environ.get(VARIABLE)
    if not home:
        install = "tests/training/triton_install/install DIR"
        pytest.skip(f"needs a Triton server: {install}, then {VARIABLE}=DIR pytest -m serving")
    stub = Path(home) / "pytriton" / "tritonserver" / _STUB
    if not stub.exists():
        pytest.skip(f"{VARIABLE}={home}: the installation of the Triton server is not whole ({stub.name} is missing)")
    missing = re.findall(r"^\s*(\S+) => not found", _ldd(stub), flags=re.MULTILINE)
    if missing:
        pytest.skip(f"the Triton server needs {', '.join(missing)} (Debian: apt-get install libpython3.11)")
    return Path(home)


def _home_of_library(stub: Path) -> Path:
    """The installation of the libpython that the stub loads: another python3's modules may not fit it."""
    library = Path(re.search(r"libpython\S+ => (\S+)", _ldd(stub))[1]).resolve()
    modules = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "os.py")
    return next(folder for folder in library.parents if (folder / modules).exists())


def _ldd(path: Path) -> str:
    return subprocess.run(["ldd", str(path)], capture_output=True, text=True, timeout=20).stdout
