"""A call of the C API on arrays."""
from __future__ import annotations

from typing import Any

from . import _problem
from ._arrays import Array, Arrays
from ._errors import check
from ._handle import Handle, handle_of
from ._library import Struct


class Call:
    """The arguments of a C call, with all that they point to."""

    def __init__(self, arrays: Arrays, handle: Handle | None, *structs: Struct):
        self.arrays = arrays
        if not isinstance(handle, (Handle, type(None))):
            raise TypeError(f"handle: {type(handle).__name__} is no cuflash.Handle")
        self.handle = handle or handle_of(arrays.device)
        self.structs = structs

    def run(self, function) -> None:
        check(function(self.handle, *self.structs, self.arrays.stream))
        self.arrays.wait()

    def output(self, *names: str) -> Any:
        """What the caller gets: an array, of several names a tuple."""
        results = tuple(self.arrays.output(name) for name in names)
        return results if len(names) > 1 else results[0]


def read(stream: Any, query: bool, options: dict[str, Any], **arrays: Array | None) -> Arrays:
    """The arrays of a call; those among its options give way to their views there."""
    optional = {name: value for name, value in options.items()
                if name in _problem.ARRAYS and not isinstance(value, (str, int, type(None)))}
    result = Arrays(stream, query, **arrays, **optional)
    options.update((name, result[name]) for name in optional)
    return result
