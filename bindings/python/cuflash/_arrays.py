"""Arrays of any library as views: address, shape, strides, dtype, device. Nothing is copied.

Each library of arrays has a class here that tells how its arrays are read, on which stream its
caller works, and how a new array like another is made. To know one more library, add a class.
"""
from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

from . import _dlpack, cuda
from . import _raw as raw
from ._errors import error

Array = Any  # of NumPy, PyTorch, CuPy, Numba, JAX, or with one of the three protocols

CPU: int = int(raw.CUFLASH_DEVICE_CPU)

#: dtypes of tensors that calls compute with
FLOATS = {"f32": raw.CUFLASH_F32, "f16": raw.CUFLASH_F16, "bf16": raw.CUFLASH_BF16}
#: and of what caches hold besides, by NumPy's names; uint8 is for what has no dtype of its own
CODES = {"int8": raw.CUFLASH_INT8, "float8_e4m3fn": raw.CUFLASH_FP8_E4M3, "float8_e5m2": raw.CUFLASH_FP8_E5M2}
BYTES = {"int4": raw.CUFLASH_INT4, "float8_e4m3fn": raw.CUFLASH_FP8_E4M3, "float8_e5m2": raw.CUFLASH_FP8_E5M2}
ITEMSIZE = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
_NUMPY_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "uint32": "u32",
                "int64": "i64", "uint64": "u64"}
_LONG_NAMES = {short: long for long, short in _NUMPY_NAMES.items()}
_TYPESTRS = {"<f4": "f32", "<f2": "f16", "<i4": "i32", "<u4": "u32", "<i8": "i64", "<u8": "u64", "|i1": "int8",
             "|u1": "uint8"}


def spelled(dtype: str) -> str:
    """For messages."""
    return _LONG_NAMES.get(dtype, dtype)


def refuse(status: int, message: str) -> NoReturn:
    raise error(status, message)


class View:
    """An array's memory. Strides are in elements; those of an extent of 0 or 1 are 0."""

    __slots__ = ("name", "pointer", "shape", "strides", "dtype", "writable", "owner")

    def __init__(self, name: str, pointer: int, shape, strides, dtype: str, writable: bool = True,
                 owner: Any = None):
        self.name = name
        self.pointer = pointer
        self.shape = tuple(shape)
        if 0 in self.shape:  # nothing to step over; libraries fill in what they like
            strides = _dlpack.dense(self.shape)
        self.strides = tuple([s if n > 1 else 0 for n, s in zip(self.shape, strides)])
        self.dtype = dtype  # a key of ITEMSIZE, or the foreign name of what cuflash does not know
        self.writable = writable
        self.owner = owner  # what else keeps the memory
        if self.strides and min(self.strides) < 0:
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
                   f"{name}: strides {self.strides}; negative strides are not supported, copy it")

    @classmethod
    def of_bytes(cls, name, pointer, shape, strides, dtype, writable=True, owner=None):
        """As View(), with strides in bytes or None for a dense array."""
        if strides is None:
            strides = _dlpack.dense(shape)
        else:
            size = ITEMSIZE.get(dtype, 1)
            if any([stride % size for stride, extent in zip(strides, shape) if extent > 1]):
                refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
                       f"{name}: strides of {tuple(strides)} bytes; whole elements of {size} bytes")
            strides = [stride // size for stride in strides]
        return cls(name, pointer, shape, strides, dtype, writable, owner)


def device_name(device: int) -> str:
    return "the CPU" if device == CPU else f"CUDA device {device}"


# ---- the libraries --------------------------------------------------------------------------------


class Numpy:
    """numpy.ndarray: the CPU device."""

    @staticmethod
    def device(array: Array) -> int | None:
        return CPU

    @staticmethod
    def stream(array: Array, device: int) -> int | None:
        return None

    @staticmethod
    def view(name: str, array: Array, stream: int | None) -> View:
        if hasattr(array, "mask"):
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"{name}: a masked array; pass its data")
        pointer, read_only = array.__array_interface__["data"]
        return View.of_bytes(name, pointer, array.shape, array.strides, numpy_dtype(array.dtype),
                             not read_only)

    @staticmethod
    def empty(like: Array, shape, dtype: str) -> Array:
        import numpy

        return numpy.empty(shape, "f4" if dtype == "f32" else like.dtype)

    @staticmethod
    def result(array: Array, like: Array) -> Array:
        return array


class Torch(Numpy):
    """torch.Tensor, on the CPU or CUDA."""

    @staticmethod
    def device(array: Array) -> int:
        if array.device.type not in ("cpu", "cuda"):
            refuse(raw.CUFLASH_ERROR_WRONG_DEVICE,
                   f"a tensor on {array.device}; the CPU or a CUDA device")
        return array.get_device()  # -1 is the CPU here as well

    @staticmethod
    def stream(array: Array, device: int) -> int | None:
        if device == CPU:
            return None
        return sys.modules["torch"].cuda.current_stream(device).cuda_stream

    @staticmethod
    def view(name: str, array: Array, stream: int | None) -> View:
        torch = sys.modules["torch"]
        if array.requires_grad and torch.is_grad_enabled():
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
                   f"{name}: requires grad; use cuflash.torch, which is differentiable, or detach()")
        if array.layout != torch.strided or array.is_neg():
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
                   f"{name}: sparse or lazily negated; a tensor with strides is needed")
        dtype = str(array.dtype).partition(".")[2]
        return View(name, array.data_ptr(), array.shape, array.stride(),
                    _NUMPY_NAMES.get(dtype, dtype))

    @staticmethod
    def empty(like: Array, shape, dtype: str) -> Array:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=torch.float32 if dtype == "f32" else like.dtype,
                           device=like.device)


class Interface(Numpy):
    """__cuda_array_interface__: Numba and others."""

    @staticmethod
    def device(array: Array) -> int | None:
        pointer = array.__cuda_array_interface__["data"][0]
        return cuda.device_of(pointer) if pointer else None

    @staticmethod
    def stream(array: Array, device: int) -> int | None:
        return array.__cuda_array_interface__.get("stream")

    @staticmethod
    def view(name: str, array: Array, stream: int | None) -> View:
        given = array.__cuda_array_interface__
        if given.get("mask") is not None:
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"{name}: a masked array; pass its data")
        pointer, read_only = given["data"]
        return View.of_bytes(name, pointer or 0, given["shape"], given.get("strides"),
                             interface_dtype(array, given["typestr"]), not read_only, given)

    @staticmethod
    def empty(like: Array, shape, dtype: str) -> Array:
        refuse(raw.CUFLASH_ERROR_NULL_POINTER,
               f"cannot make a new {type(like).__name__}: pass the outputs (out=, lse=)")


class Numba(Interface):
    """numba.cuda device arrays."""

    @staticmethod
    def empty(like: Array, shape, dtype: str) -> Array:
        from numba import cuda as numba_cuda  # type: ignore[import-not-found]

        with numba_cuda.gpus[Interface.device(like) or 0]:  # None: nothing of it is anywhere
            return numba_cuda.device_array(shape, "f4" if dtype == "f32" else like.dtype)


class Cupy(Interface):
    """cupy.ndarray."""

    @staticmethod
    def device(array: Array) -> int:
        return array.device.id

    @staticmethod
    def stream(array: Array, device: int) -> int | None:
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr

    @staticmethod
    def view(name: str, array: Array, stream: int | None) -> View:
        return View.of_bytes(name, array.data.ptr, array.shape, array.strides,
                             numpy_dtype(array.dtype))

    @staticmethod
    def empty(like: Array, shape, dtype: str) -> Array:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device.id):
            return cupy.empty(shape, "f4" if dtype == "f32" else like.dtype)


class Dlpack(Numpy):
    """__dlpack__: JAX and others. Results are new memory that the library takes over."""

    @staticmethod
    def device(array: Array) -> int:
        kind, ordinal = array.__dlpack_device__()
        if kind in (_dlpack.CPU, _dlpack.CUDA_HOST):
            return CPU
        if kind in (_dlpack.CUDA, _dlpack.CUDA_MANAGED):
            return ordinal
        refuse(raw.CUFLASH_ERROR_WRONG_DEVICE,
               f"an array on DLPack device type {int(kind)}; the CPU or a CUDA device")

    @classmethod
    def view(cls, name: str, array: Array, stream: int | None) -> View:
        # DLPack calls the legacy default stream 1 and gives 0 no meaning.
        capsule = _dlpack.export(array, None if cls.device(array) == CPU else stream or 1)
        tensor, writable = _dlpack.read(capsule)
        key = (tensor.code, tensor.bits)
        dtype = _dlpack.DTYPES.get(key) if tensor.lanes == 1 else None
        return View(name, (tensor.data or 0) + tensor.byte_offset, tensor.shape[: tensor.ndim],
                    _dlpack.strides(tensor), dtype or f"DLPack type {key}", writable and not is_jax(array), capsule)

    @classmethod
    def empty(cls, like: Array, shape, dtype: str) -> Array:
        if not hasattr(like, "__array_namespace__"):
            return Interface.empty(like, shape, dtype)
        return _dlpack.Memory(cls.device(like), shape, dtype)

    @staticmethod
    def result(array: Array, like: Array) -> Array:
        if isinstance(array, _dlpack.Memory):
            return like.__array_namespace__().from_dlpack(array)
        return array


class HostInterface(Numpy):
    """__array_interface__ alone."""

    @staticmethod
    def view(name: str, array: Array, stream: int | None) -> View:
        given = array.__array_interface__
        if given.get("mask") is not None or given.get("data") is None:
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"{name}: an array with a mask or without an address")
        pointer, read_only = given["data"]
        return View.of_bytes(name, pointer, given["shape"], given.get("strides"),
                             interface_dtype(array, given["typestr"]), not read_only, given)

    empty = Interface.empty


@functools.lru_cache(maxsize=64)
def numpy_dtype(dtype) -> str:
    """The name of a NumPy dtype; foreign ones, as those in another byte order, keep their own."""
    return _NUMPY_NAMES.get(dtype.name, dtype.name) if dtype.isnative else str(dtype)


def interface_dtype(array: Array, typestr: str) -> str:
    """Protocols of arrays know bfloat16 only as two bytes of anything; the array's dtype tells."""
    if typestr[1:] == "V2" and getattr(getattr(array, "dtype", None), "name", "") == "bfloat16":
        return "bf16"
    return _TYPESTRS.get(typestr, typestr)


def is_jax(array: Array) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


_libraries: dict[type, type[Numpy]] = {}  # found before, by the array's type


def library_of(name: str, array: Array) -> type[Numpy]:
    """The class above for an array."""
    kind = type(array)
    if kind not in _libraries:
        _libraries[kind] = _find_library(name, array)
    return _libraries[kind]


def _find_library(name: str, array: Array) -> type[Numpy]:
    for module, kind, library in (("numpy", "ndarray", Numpy), ("torch", "Tensor", Torch),
                                  ("cupy", "ndarray", Cupy)):
        # What is not imported cannot have made the array.
        if isinstance(array, getattr(sys.modules.get(module), kind, ())):
            return library
    if type(array).__module__.startswith("numba.") and hasattr(array, "__cuda_array_interface__"):
        return Numba
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return Dlpack
    if hasattr(array, "__cuda_array_interface__"):
        return Interface
    if hasattr(array, "__array_interface__"):
        return HostInterface
    raise TypeError(
        f"{name}: {type(array).__name__} is no array: it has none of __array_interface__, "
        "__cuda_array_interface__ and __dlpack__")


# ---- the arrays of a call -------------------------------------------------------------------------


class Arrays:
    """The arrays of one call, by name, on one device and one stream. The first is the model of
    new outputs, which a query gets without memory."""

    def __init__(self, stream: Any, query: bool = False, **arrays: Array | None):
        self._query = query
        given = {name: array for name, array in arrays.items() if array is not None}
        self._libraries = {name: library_of(name, array) for name, array in given.items()}
        self._first = next(iter(given))
        devices = {name: library.device(given[name]) for name, library in self._libraries.items()}
        known = {name: device for name, device in devices.items() if device is not None}
        # Empty arrays may be nowhere.
        first, self.device = next(iter(known.items()), ("", int(raw.CUFLASH_DEVICE_CURRENT)))
        for name, device in known.items():
            if device != self.device:
                refuse(raw.CUFLASH_ERROR_WRONG_DEVICE,
                       f"{name}: on {device_name(device)}, but {first} is on {device_name(self.device)}")
        self.stream = (self._stream_of(given) if stream is None else stream_address(stream))
        self._arrays = given
        self._views = {name: library.view(name, given[name], self.stream)
                       for name, library in self._libraries.items()}

    def _stream_of(self, given: dict[str, Array]) -> int | None:
        """The stream on which the arrays' libraries work for the caller."""
        streams: dict[int, str] = {}
        for name, library in self._libraries.items():
            stream = library.stream(given[name], self.device)
            if stream is not None:
                # 1 is the legacy default stream in the array interface and in CUDA, as is NULL.
                streams.setdefault(0 if stream == 1 else stream, name)
        if len(streams) > 1:
            names = ", ".join(f"{name} on {stream:#x}" for stream, name in streams.items())
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
                   f"arrays on different streams ({names}); order them and pass stream=")
        return next(iter(streams), None)

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def __getitem__(self, name: str) -> View:
        return self._views[name]

    def get(self, name: str) -> View | None:
        return self._views.get(name)

    def add_output(self, name: str, shape: tuple[int, ...], dtype: str, like: str | None = None) -> None:
        """A new dense array, unless one was given; dtype: "f32" or that of the array `like`, which is the
        first if it is not given."""
        if name in self._views:
            self.check_writable(name)
            return
        if self._query:
            self._views[name] = View(name, 0, shape, _dlpack.dense(shape), dtype)
            return
        like = like or self._first
        library = self._libraries[like]
        array = library.empty(self._arrays[like], shape, dtype)
        self._arrays[name], self._libraries[name] = array, library
        if isinstance(array, _dlpack.Memory):
            self._views[name] = View(name, array.pointer, shape, _dlpack.dense(shape), dtype)
        else:
            self._views[name] = library.view(name, array, self.stream)

    def check_writable(self, name: str) -> None:
        if not self._views[name].writable:
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"{name}: cannot be written")

    def wait(self) -> None:
        """After the call. Libraries known by DLPack alone free memory in an order of their own: what
        they gave must not be in use any more, and what they get be done."""
        if self.device >= 0 and Dlpack in self._libraries.values():
            cuda.synchronize(self.device, self.stream)

    def output(self, name: str) -> Array:
        """What the caller gets, after the call."""
        return self._libraries[name].result(self._arrays[name], self._arrays[self._first])


def stream_address(stream: Any) -> int | None:
    """A stream as an integer: an integer, or a stream object of PyTorch, CuPy, Numba, or with the
    protocol __cuda_stream__."""
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]
    for attribute in ("cuda_stream", "ptr", "handle"):
        stream = getattr(stream, attribute, stream)
    address = getattr(stream, "value", stream)  # Numba's handle is a c_void_p
    if not isinstance(address, (int, type(None))):
        raise TypeError(f"stream: {type(address).__name__} is no stream")
    return address
