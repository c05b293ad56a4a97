"""Device memory through the CUDA driver alone, for programs without an array library for GPUs.

    with cuda.Device(0) as device:
        q = device.from_numpy(array)
        ...  # pass q.ptr to cuflash
        result = o.to_numpy(shape, dtype)

A device is its primary context, the one that cuflash and every other user of the CUDA runtime
share. All copies are synchronous. Buffers are freed with their device at the latest.
"""
from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_void_p


class Error(RuntimeError):
    """The CUDA driver is missing, has no device, or refused a call."""


# Without the types ctypes would cut addresses to 32 bits.
_SIGNATURES = {
    "cuInit": [c_int],
    "cuDriverGetVersion": [c_void_p],
    "cuDeviceGetCount": [c_void_p],
    "cuDeviceGet": [c_void_p, c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [c_void_p, c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [c_void_p],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [c_void_p, c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemsetD8_v2": [c_uint64, c_ubyte, c_size_t],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuStreamSynchronize": [c_void_p],
    "cuGetErrorString": [c_int, c_void_p],
}


@functools.lru_cache(maxsize=None)
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Error(f"no CUDA driver: {error}") from None
    for name, arguments in _SIGNATURES.items():
        getattr(driver, name).argtypes = arguments
    _check(driver, "cuInit", driver.cuInit(0))
    return driver


def _check(driver: ctypes.CDLL, name: str, result: int) -> None:
    if result:
        text = c_char_p()
        driver.cuGetErrorString(result, byref(text))
        raise Error(f"{name}: {(text.value or b'unknown error').decode()} ({result})")


def _call(name: str, *arguments) -> None:
    driver = _driver()
    _check(driver, name, getattr(driver, name)(*arguments))


def device_count() -> int:
    """Number of CUDA devices; 0 also where there is no driver."""
    count = c_int()
    try:
        _call("cuDeviceGetCount", byref(count))
    except Error:
        return 0
    return count.value


def available() -> bool:
    return device_count() > 0


def describe() -> str:
    """The devices and the driver in one line, or why there are none."""
    try:
        version, names = c_int(), []
        _call("cuDriverGetVersion", byref(version))
        for ordinal in range(device_count()):
            name = ctypes.create_string_buffer(256)
            _call("cuDeviceGetName", name, len(name), ordinal)
            names.append(name.value.decode())
    except Error as error:
        return f"none ({error})"
    driver = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return f"{', '.join(names) or 'none'} ({driver})"


def device_of(pointer: int) -> int:
    """The ordinal of the device that the memory at an address belongs to."""
    ordinal = c_int()
    _call("cuPointerGetAttribute", byref(ordinal), 9, pointer)  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return ordinal.value


def synchronize(ordinal: int, stream: int | None) -> None:
    """Waits for the work on a device's stream."""
    with Device(ordinal):
        _call("cuStreamSynchronize", stream)


class Buffer:
    """Device memory: .ptr is its address, .nbytes its size."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        address = c_uint64()
        if nbytes:  # CUDA refuses an allocation of nothing; NULL is right for it
            _call("cuMemAlloc_v2", byref(address), nbytes)
        self.ptr = address.value

    def copy_from(self, array) -> None:
        """Copies a whole NumPy array into the start of the buffer."""
        import numpy

        array = numpy.ascontiguousarray(array)
        if array.nbytes > self.nbytes:
            raise ValueError(f"{array.nbytes} bytes do not fit into {self.nbytes}")
        if array.nbytes:
            _call("cuMemcpyHtoD_v2", self.ptr, array.ctypes.data, array.nbytes)

    def to_numpy(self, shape, dtype):
        """A NumPy array with a copy of the start of the buffer, after all work enqueued so far."""
        import numpy

        array = numpy.empty(shape, dtype)
        if array.nbytes > self.nbytes:
            raise ValueError(f"the buffer has {self.nbytes} bytes, not {array.nbytes}")
        _call("cuCtxSynchronize")
        if array.nbytes:
            _call("cuMemcpyDtoH_v2", array.ctypes.data, self.ptr, array.nbytes)
        return array

    def fill(self, byte: int) -> None:
        if self.nbytes:
            _call("cuMemsetD8_v2", self.ptr, byte, self.nbytes)

    def free(self) -> None:
        """Gives the memory back; a second time does nothing."""
        if self.ptr:
            _call("cuMemFree_v2", self.ptr)
            self.ptr = 0


class Device:
    """A CUDA device, current inside its `with` block, which also frees its buffers."""

    def __init__(self, ordinal: int = 0):
        count = device_count()
        if not 0 <= ordinal < count:
            _driver()  # says so itself if there is none
            raise Error(f"no CUDA device {ordinal}: there are {count}")
        self.ordinal = ordinal
        self._buffers: list[Buffer] = []

    def __enter__(self) -> Device:
        context = c_void_p()
        _call("cuDevicePrimaryCtxRetain", byref(context), self.ordinal)
        _call("cuCtxPushCurrent_v2", context)
        return self

    def __exit__(self, *_) -> None:
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()
        _call("cuCtxPopCurrent_v2", byref(c_void_p()))
        _call("cuDevicePrimaryCtxRelease_v2", self.ordinal)

    def empty(self, nbytes: int) -> Buffer:
        buffer = Buffer(nbytes)
        self._buffers.append(buffer)
        return buffer

    def from_numpy(self, array) -> Buffer:
        buffer = self.empty(array.nbytes)
        buffer.copy_from(array)
        return buffer

    def synchronize(self) -> None:
        _call("cuCtxSynchronize")


class Allocation(Buffer):
    """Device memory that outlives any `with` block; freed with the object."""

    def __init__(self, ordinal: int, nbytes: int):
        self.ordinal, self.ptr = ordinal, 0
        with Device(ordinal):
            super().__init__(nbytes)

    def __del__(self) -> None:
        if self.ptr:
            with Device(self.ordinal):
                self.free()
