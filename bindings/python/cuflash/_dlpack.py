"""DLPack by ctypes: reading the capsule of another library's array, and giving memory away in one.

A capsule is read without being consumed: while it lives it holds the memory, and its own destructor
gives it back.
"""
from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

from . import cuda

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
VERSION = (1, 0)  # of the newest capsules read here
_READ_ONLY = 1

#: (DLDataTypeCode, bits) -> name
DTYPES = {(2, 32): "f32", (2, 16): "f16", (4, 16): "bf16", (0, 8): "int8", (0, 32): "i32", (0, 64): "i64",
          (1, 8): "uint8", (1, 32): "u32", (1, 64): "u64", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"}


class Tensor(ctypes.Structure):
    """DLTensor"""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),  # elements; NULL: dense
        ("byte_offset", c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor"""

    _fields_ = [("tensor", Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned"""

    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("context", c_void_p),
                ("deleter", c_void_p), ("flags", c_uint64), ("tensor", Tensor)]


def _python(name: str, result, *arguments):
    function = ctypes.pythonapi[name]  # not the attribute, whose types all users would share
    function.restype, function.argtypes = result, arguments
    return function


_is_capsule = _python("PyCapsule_IsValid", c_int32, ctypes.py_object, c_char_p)
_pointer_in = _python("PyCapsule_GetPointer", c_void_p, ctypes.py_object, c_char_p)
_new_capsule = _python("PyCapsule_New", ctypes.py_object, c_void_p, c_char_p, c_void_p)
# For a destructor, whose capsule has no references left that a py_object could borrow.
_is_dying_capsule = _python("PyCapsule_IsValid", c_int32, c_void_p, c_char_p)
_pointer_in_dying = _python("PyCapsule_GetPointer", c_void_p, c_void_p, c_char_p)


def export(array, stream: int | None):
    """The array's capsule, whose contents work enqueued on the stream may read (None: the CPU)."""
    try:
        return array.__dlpack__(stream=stream, max_version=VERSION)
    except TypeError:  # a library from before versions
        return array.__dlpack__(stream=stream)


def read(capsule) -> tuple[Tensor, bool]:
    """The tensor in a capsule, valid while the capsule lives, and whether it may be written."""
    if _is_capsule(capsule, b"dltensor_versioned"):
        address = _pointer_in(capsule, b"dltensor_versioned")
        versioned = _Versioned.from_address(address)
        if versioned.major != VERSION[0]:
            raise BufferError(f"DLPack {versioned.major}.{versioned.minor}; {VERSION[0]}.x is known")
        return versioned.tensor, not versioned.flags & _READ_ONLY
    return _Managed.from_address(_pointer_in(capsule, b"dltensor")).tensor, True


def strides(tensor: Tensor) -> tuple[int, ...]:
    """In elements."""
    if tensor.strides:
        return tuple(tensor.strides[: tensor.ndim])
    return dense(tensor.shape[: tensor.ndim])


def dense(shape) -> tuple[int, ...]:
    """Strides of a dense array, in elements."""
    result, step = [], 1
    for extent in reversed(shape):
        result.append(step)
        step *= extent
    return tuple(reversed(result))


# ---- memory to give away ------------------------------------------------------------------------

_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype, _libc.aligned_alloc.argtypes = c_void_p, [c_size_t, c_size_t]
_libc.free.restype, _libc.free.argtypes = None, [c_void_p]

_ALIGNMENT = 256
_given: dict[int, tuple] = {}  # address of a DLManagedTensor -> what lives as long as it


@ctypes.CFUNCTYPE(None, c_void_p)
def _release(managed):
    """The deleter: called once, on any thread."""
    _given.pop(managed)


@ctypes.PYFUNCTYPE(None, c_void_p)
def _drop_capsule(capsule):
    """The capsule's destructor: a consumer renames a capsule and then owns what is in it."""
    if _is_dying_capsule(capsule, b"dltensor"):
        _release(_pointer_in_dying(capsule, b"dltensor"))


class Memory:
    """New dense memory on a device (a CUDA ordinal, -1: the CPU) for another library to take over
    by from_dlpack(), once, when it is filled."""

    def __init__(self, device: int, shape: tuple[int, ...], dtype: str):
        self.device, self.shape, self.dtype = device, shape, dtype
        (self._code, self._bits), = (key for key, name in DTYPES.items() if name == dtype)
        nbytes = self._bits // 8
        for extent in shape:
            nbytes *= extent
        self.pointer = 0
        if device >= 0:
            self._buffer = cuda.Allocation(device, nbytes)
            self.pointer = self._buffer.ptr
        else:
            self.pointer = _libc.aligned_alloc(_ALIGNMENT, max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT)
            if not self.pointer:
                raise MemoryError(f"{nbytes} bytes")

    def __del__(self) -> None:
        if self.device < 0 and self.pointer:
            _libc.free(self.pointer)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self.device < 0 else (CUDA, self.device)

    def __dlpack__(self, **_):
        shape = (c_int64 * len(self.shape))(*self.shape)
        managed = _Managed(deleter=ctypes.cast(_release, c_void_p).value)
        tensor = managed.tensor
        tensor.data, tensor.shape, tensor.ndim = self.pointer, shape, len(self.shape)
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        tensor.code, tensor.bits, tensor.lanes = self._code, self._bits, 1
        address = ctypes.addressof(managed)
        _given[address] = (managed, shape, self)
        return _new_capsule(address, b"dltensor", ctypes.cast(_drop_capsule, c_void_p))
