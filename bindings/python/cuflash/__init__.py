"""cuflash: exact attention as a system library.

cuflash.raw holds the C API as it is (ctypes; the header cuflash.h is its manual). Around it:

    from cuflash import raw, check
    check(raw.cuflash_attention_forward(handle, problem, stream))   # raises cuflash.Error

cuflash.cuda gives device memory where no array library does.
"""
from __future__ import annotations

import ctypes
import json
import platform

from . import _library
from . import _raw as raw
from ._library import LibraryError
from ._library import path as library_path
from ._library import version as library_version

__version__ = "{}.{}.{}".format(
    raw.CUFLASH_VERSION_MAJOR, raw.CUFLASH_VERSION_MINOR, raw.CUFLASH_VERSION_PATCH)
__all__ = ["Error", "Handle", "LibraryError", "check", "explain", "kernels", "library_path",
           "library_version", "raw", "set_log_callback", "show_versions"]

_library.check_version((raw.CUFLASH_VERSION_MAJOR, raw.CUFLASH_VERSION_MINOR))


class Error(RuntimeError):
    """A call that failed: its status, the status's name and the library's message."""

    def __init__(self, status: int, name: str, message: str):
        super().__init__(f"{name} ({status}): {message}")
        self.status = status
        self.name = name
        self.message = message


def check(status: int) -> None:
    """Raises Error for a status other than 0; the message is this thread's, so call it at once."""
    if status != raw.CUFLASH_SUCCESS:
        message = raw.cuflash_last_error() or raw.cuflash_error_string(status)
        raise Error(status, raw.cuflash_status_name(status).decode(), message.decode())


class Handle:
    """A handle, freed by close(), by leaving a `with` block, or with the object."""

    def __init__(self, device: int):
        self._callbacks = ()  # ctypes callbacks live as long as Python holds them
        handle = raw.cuflash_handle_t()
        check(raw.cuflash_create(ctypes.byref(handle), device))
        self._as_parameter_ = handle

    def set_option(self, key: int, value: int) -> None:
        check(raw.cuflash_set_option(self, key, value))

    def set_kernel(self, name: str | None) -> None:
        check(raw.cuflash_set_kernel(self, name.encode() if name else None))

    def set_allocator(self, allocate, release) -> None:
        """allocate(bytes, device, stream) -> address or None; release(address, device, stream)."""
        callbacks = (
            raw.cuflash_alloc_fn(lambda user, *arguments: allocate(*arguments)),
            raw.cuflash_free_fn(lambda user, *arguments: release(*arguments)),
        )
        check(raw.cuflash_set_allocator(self, *callbacks, None))
        self._callbacks = callbacks

    def close(self) -> None:
        # Without the attribute ctypes refuses the object; a NULL would be the default device.
        handle = self.__dict__.pop("_as_parameter_", None)
        if handle is not None:
            check(raw.cuflash_destroy(handle))

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


_log_callbacks = []  # never freed: another thread may still be inside an old one


def set_log_callback(callback, level: int = raw.CUFLASH_LOG_CALLS) -> None:
    """Sends log lines to callback(level, text), or to where the environment says if None."""
    if callback is None:
        raw.cuflash_set_log_callback(raw.cuflash_log_fn(), None, level)
        return
    _log_callbacks.append(
        raw.cuflash_log_fn(lambda user, level, text: callback(level, text.decode())))
    raw.cuflash_set_log_callback(_log_callbacks[-1], None, level)


def explain(operation: str, *arguments) -> dict:
    """Which kernel a call takes and why not the others: explain("forward", handle, problem);
    likewise "backward", "decode" and "append" with the arguments of the call."""
    query = getattr(raw, f"cuflash_{operation}_explain")
    needed = ctypes.c_size_t()
    check(query(*arguments, None, 0, ctypes.byref(needed)))
    buffer = ctypes.create_string_buffer(needed.value)
    check(query(*arguments, buffer, len(buffer), None))
    return json.loads(buffer.value)


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
