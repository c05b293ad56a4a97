"""cuflash: exact attention as a system library.

On arrays of NumPy (the CPU device), PyTorch, CuPy, Numba, JAX and others, without copies:

    o = cuflash.attention(q, k, v, causal=True)

attention, attention_varlen, their backward passes, attention_weights, decode and merge_states are the
operations, KVCache and PagedKVCache what decode attends to and new keys and values are appended to. explain tells
which kernel a call takes. cuflash.torch has them as differentiable PyTorch operators. cuflash.raw holds the C API as it
is (ctypes; the header cuflash.h is its manual), cuflash.cuda device memory where no library of
arrays gives it.
"""
from __future__ import annotations

import importlib
import platform
import sys

from . import _library
from . import _raw as raw
from ._attention import (
    attention, attention_backward, attention_varlen, attention_varlen_backward, attention_weights, decode,
    explain, merge_states)
from ._cache import KVCache, PagedKVCache
from ._errors import ArgumentError, DeviceError, Error, OutOfMemoryError, UnsupportedError, check
from ._handle import Handle
from ._library import LibraryError
from ._library import path as library_path
from ._library import version as library_version

__version__ = "{}.{}.{}".format(
    raw.CUFLASH_VERSION_MAJOR, raw.CUFLASH_VERSION_MINOR, raw.CUFLASH_VERSION_PATCH)
__all__ = ["ArgumentError", "DeviceError", "Error", "Handle", "KVCache", "LibraryError", "OutOfMemoryError",
           "PagedKVCache", "UnsupportedError", "attention", "attention_backward", "attention_varlen",
           "attention_varlen_backward", "attention_weights", "check", "decode", "explain", "kernels",
           "library_path", "library_version", "merge_states", "raw", "set_log_callback", "show_versions"]

_library.check_version((raw.CUFLASH_VERSION_MAJOR, raw.CUFLASH_VERSION_MINOR))

_log_callbacks: list = []  # never freed: another thread may still be inside an old one


def set_log_callback(callback, level: int = raw.CUFLASH_LOG_CALLS) -> None:
    """Sends log lines to callback(level, text), or to where the environment says if None."""
    if callback is None:
        raw.cuflash_set_log_callback(raw.cuflash_log_fn(), None, level)
        return
    _log_callbacks.append(
        raw.cuflash_log_fn(lambda user, level, text: callback(level, text.decode())))
    raw.cuflash_set_log_callback(_log_callbacks[-1], None, level)


def kernels() -> list[raw.cuflash_kernel_info_t]:
    """All kernels of the library, built or not."""
    infos = [raw.cuflash_kernel_info_t.new() for _ in range(raw.cuflash_kernel_count())]
    for index, info in enumerate(infos):
        check(raw.cuflash_kernel_info(index, info))
    return infos


def show_versions() -> None:
    """Prints what a bug report needs."""
    from . import cuda

    print(f"cuflash bindings  {__version__}")
    print(f"libcuflash        {'.'.join(map(str, library_version()))}  {library_path()}")
    print(f"build             {raw.cuflash_build_info().decode()}")
    print(f"CUDA devices      {cuda.describe()}")
    print(f"Python            {platform.python_version()}, {platform.platform()}")
    loaded = [f"{name} {sys.modules[name].__version__}" for name in ("numpy", "torch", "cupy", "numba", "jax")
              if hasattr(sys.modules.get(name), "__version__")]
    print(f"loaded            {', '.join(loaded) or 'no library of arrays'}")


def __getattr__(name: str):
    """cuflash.torch is imported, and PyTorch with it, when it is first asked for."""
    if name == "torch":
        return importlib.import_module(".torch", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
