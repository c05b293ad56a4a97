"""Statuses as exceptions."""
from __future__ import annotations

from . import _raw as raw


class Error(RuntimeError):
    """A call that failed: its status, the status's name, and a message that names the argument."""

    def __init__(self, status: int, message: str):
        self.status = int(status)
        self.name = raw.cuflash_status_name(self.status).decode()
        self.message = message
        super().__init__(f"{self.name} ({self.status}): {message}")

    def __reduce__(self):
        return type(self), (self.status, self.message)


class ArgumentError(Error, ValueError):
    """An argument that the library (or this package) refused; nothing was written."""


class UnsupportedError(Error, NotImplementedError):
    """A feature or combination that no kernel of this library has, or that this build left out."""


class OutOfMemoryError(Error, MemoryError):
    """Device or host memory ran out."""


class DeviceError(Error):
    """CUDA: no device or driver, a refused launch, or a fault of earlier work."""


_CLASSES: dict[int, type[Error]] = {
    raw.CUFLASH_ERROR_INVALID_DIMENSION: ArgumentError,
    raw.CUFLASH_ERROR_DIMENSION_MISMATCH: ArgumentError,
    raw.CUFLASH_ERROR_NULL_POINTER: ArgumentError,
    raw.CUFLASH_ERROR_CUDA: DeviceError,
    raw.CUFLASH_ERROR_OUT_OF_MEMORY: OutOfMemoryError,
    raw.CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM: ArgumentError,
    raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE: ArgumentError,
    raw.CUFLASH_ERROR_INVALID_VALUE: ArgumentError,
    raw.CUFLASH_ERROR_MISALIGNED: ArgumentError,
    raw.CUFLASH_ERROR_UNSUPPORTED: UnsupportedError,
    raw.CUFLASH_ERROR_WORKSPACE_TOO_SMALL: ArgumentError,
    raw.CUFLASH_ERROR_NO_DEVICE: DeviceError,
    raw.CUFLASH_ERROR_UNSUPPORTED_ARCH: UnsupportedError,
    raw.CUFLASH_ERROR_STRUCT_SIZE: ArgumentError,
    raw.CUFLASH_ERROR_ALIASING: ArgumentError,
    raw.CUFLASH_ERROR_WRONG_DEVICE: ArgumentError,
    raw.CUFLASH_ERROR_NOT_BUILT: UnsupportedError,
    raw.CUFLASH_ERROR_DRIVER_TOO_OLD: DeviceError,
    raw.CUFLASH_ERROR_HOST_MEMORY: OutOfMemoryError,
    raw.CUFLASH_ERROR_CAPTURE: DeviceError,
    raw.CUFLASH_ERROR_ASYNCHRONOUS: DeviceError,
}


def error(status: int, message: str) -> Error:
    """The exception for a status."""
    return _CLASSES.get(status, Error)(status, message)


def integer(name: str, value: int, bits: int = 64) -> int:
    """The value, where the C API has so many bits for it: ctypes would drop the others."""
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise error(raw.CUFLASH_ERROR_INVALID_VALUE, f"{name}: {value}; {bits} bits")
    return value


def check(status: int) -> None:
    """Raises Error for a status other than 0; the message is this thread's, so call it at once."""
    if status:
        message = raw.cuflash_last_error() or raw.cuflash_error_string(status)
        raise error(status, message.decode())
