"""The header as cffi reads it: nothing here comes from the generator or from the ctypes layer."""
from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import cffi

HEADER = Path(__file__).resolve().parents[2] / "include" / "cuflash.h"


def declarations() -> str:
    """The preprocessed header. cffi knows size_t and the fixed-width integers, so the system's
    headers, which its parser does not read, are replaced by empty ones."""
    with tempfile.TemporaryDirectory() as empty:
        for name in ("stddef.h", "stdint.h"):
            (Path(empty) / name).touch()
        return subprocess.run(["gcc", "-E", "-P", "-nostdinc", f"-I{empty}", str(HEADER)],
                              check=True, capture_output=True, text=True).stdout


def load(library: str) -> tuple:
    ffi = cffi.FFI()
    ffi.cdef(declarations())
    return ffi, ffi.dlopen(library)


def function_names(lib) -> list[str]:
    return [name for name in dir(lib) if name.startswith("cuflash_")]
