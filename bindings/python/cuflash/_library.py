"""Finds and loads libcuflash, and gives the generated declarations their life."""
from __future__ import annotations

import ctypes
import os
from pathlib import Path

ABI = 0  # the number in the SONAME
SONAME = f"libcuflash.so.{ABI}"

PACKAGE = Path(__file__).resolve().parent


class LibraryError(ImportError):
    """libcuflash was not found, did not load, or is not the one these bindings were made for."""


def candidates() -> list[str]:
    """Where libcuflash is looked for, in this order; the first that exists is taken."""
    named = os.environ.get("CUFLASH_LIBRARY")
    if named:
        return [named]  # who names a library wants that one or an error
    found = [PACKAGE / "lib" / SONAME]
    checkout = PACKAGE.parents[2]
    if (checkout / "include" / "cuflash.h").is_file() and (checkout / "CMakeLists.txt").is_file():
        builds = [checkout / "build" / preset / "lib" / SONAME for preset in ("release", "cpu")]
        found += sorted(builds, reverse=True,
                        key=lambda path: path.stat().st_mtime if path.exists() else 0)
    return [*map(str, found), SONAME]


def load() -> ctypes.CDLL:
    tried = []
    for name in candidates():
        if "/" in name and not os.path.exists(name):
            tried.append(f"{name}: no such file")
            continue
        try:
            loaded = ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name}: {error}")
            continue
        if hasattr(loaded, "cuflash_abi_version"):
            return loaded
        tried.append(f"{name}: another library, without cuflash_abi_version")
    raise LibraryError(
        "libcuflash not found; tried\n  " + "\n  ".join(tried)
        + "\nInstall the package libcuflash0 or set CUFLASH_LIBRARY to the library's path.")


library = load()


class Struct(ctypes.Structure):
    """Base of the C API's structs. Without a __dict__ a misspelled field is an AttributeError."""

    __slots__ = ()

    @classmethod
    def new(cls, **fields):
        """All zero but struct_size, where the struct has one, and the fields given."""
        struct = cls()
        if hasattr(cls, "struct_size"):
            struct.struct_size = ctypes.sizeof(cls)
        for name, value in fields.items():
            setattr(struct, name, value)
        return struct


def function(result, arguments):
    """Decorator: the library's function of the same name, with these types and this docstring."""

    def bind(declaration):
        try:
            bound = getattr(library, declaration.__name__)
        except AttributeError:
            return _missing(declaration)
        bound.restype = result
        bound.argtypes = arguments
        bound.__doc__ = declaration.__doc__
        return bound

    return bind


def _missing(declaration):
    """An older library serves all that it has; only the call of a newer function fails."""

    def missing(*_):
        raise LibraryError(f"{path()} is too old: it has no {declaration.__name__}")

    missing.__name__ = declaration.__name__
    missing.__doc__ = declaration.__doc__
    return missing


def check_version(bindings: tuple[int, int]) -> None:
    """Refuses a library of another ABI, or older than the header behind these bindings."""
    abi = library.cuflash_abi_version()
    if abi != ABI:
        raise LibraryError(f"{path()} has ABI {abi}; these bindings are for ABI {ABI}")
    if version()[:2] < bindings:
        raise LibraryError(f"{path()} is version {'.'.join(map(str, version()))}; these bindings "
                           f"need {bindings[0]}.{bindings[1]} or newer")


def version() -> tuple[int, int, int]:
    parts = (ctypes.c_int32 * 3)()
    size = ctypes.sizeof(ctypes.c_int32)
    library.cuflash_version(*(ctypes.byref(parts, size * i) for i in range(3)))
    return tuple(parts)


class _DlInfo(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def path() -> str:
    """The file that the loader took, also where the name was only the SONAME."""
    info = _DlInfo()
    address = ctypes.cast(library.cuflash_abi_version, ctypes.c_void_p)
    ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    return os.fsdecode(info.file)
