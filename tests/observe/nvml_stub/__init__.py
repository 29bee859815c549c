"""Compiles the stub library and puts it under the real `pynvml`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

NAMES = ("INIT", "UTILISATION", "MEMORY", "MEMORY_V2", "POWER", "TEMPERATURE", "THROTTLE")
NOT_SUPPORTED, DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 3, 9, 15, 999

COMPILER = shutil.which("cc") or shutil.which("gcc")


def compile_stub(folder: Path) -> Path:
    """`libnvidia-ml.so.1` in `folder`."""
    assert COMPILER is not None
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_stub.c")
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source], check=True
    )
    return library


class Stub:
    """The stub's controls. GPUs are numbered in NVML's order."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.stub_reset()

    def add(self, uuid: str, name: str = "Stub GPU", **values: int) -> int:
        """A GPU; values by function's name, in lower case."""
        gpu = self._library.stub_add(uuid.encode(), name.encode())
        defaults = {
            "utilisation": 50,
            "memory": 9000,
            "memory_v2": 8000,
            "power": 300_000,
            "temperature": 60,
            "throttle": 0,
        }
        for function, value in (defaults | values).items():
            self._library.stub_value(gpu, NAMES.index(function.upper()), value)
        return gpu

    def init(self, code: int = 0, held: bool = False) -> None:
        """How initialising goes from now on; a call that is held comes back once this is called without."""
        self._library.stub_init(code, held)

    def code(self, gpu: int, function: str, code: int) -> None:
        self._library.stub_code(gpu, NAMES.index(function.upper()), code)

    def hold(self, gpu: int, function: str, held: bool) -> None:
        """Calls of a function do not come back while it is held."""
        self._library.stub_hold(gpu, NAMES.index(function.upper()), held)

    def calls(self, gpu: int, function: str) -> int:
        return self._library.stub_calls(gpu, NAMES.index(function.upper()))

    @property
    def open(self) -> int:
        """Initialisations minus shutdowns."""
        return self._library.stub_open()
