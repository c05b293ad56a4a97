"""Handles: a device with its options."""
from __future__ import annotations

import ctypes

from . import _raw as raw
from ._errors import check, integer


class _Closed:
    """What ctypes gets of a handle without one of its own: an error, for a NULL would be the default device."""

    def __get__(self, handle, kind):
        raise ValueError("the handle is closed")


class Handle:
    """A handle, freed by close(), by leaving a `with` block, or with the object.

    device: a CUDA ordinal, raw.CUFLASH_DEVICE_CPU or raw.CUFLASH_DEVICE_CURRENT."""

    _as_parameter_ = _Closed()  # until a handle is made, and after it is closed

    def __init__(self, device: int):
        self._callbacks: tuple = ()  # ctypes callbacks live as long as Python holds them
        handle = raw.cuflash_handle_t()
        check(raw.cuflash_create(ctypes.byref(handle), integer("device", device, 32)))
        self._as_parameter_ = handle

    def set_option(self, key: int, value: int) -> None:
        check(raw.cuflash_set_option(self, integer("key", key, 32), integer("value", value)))

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
        handle = self.__dict__.pop("_as_parameter_", None)
        if handle is not None:
            check(raw.cuflash_destroy(handle))

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


_handles: dict[int, Handle] = {}


def handle_of(device: int) -> Handle:
    """The handle with default options that calls without one share."""
    try:
        return _handles[device]
    except KeyError:
        return _handles.setdefault(device, Handle(device))
