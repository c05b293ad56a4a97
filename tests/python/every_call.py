"""Calls every function of the library with NULLs, zeros and bad values.

    every_call.py LIBRARY default|cpu

Each function is called in a forked child, so that a crash ends one child and is told with the
function's name. Prints a JSON object: function -> {"died": what it died of, or null, "last": the
last call begun, "calls": [[description, status, message]]}.

Pointers are NULL, or lead to memory that is large enough for the extents beside them: an extent
that is too large for its pointer is the caller's lie, which no library can see.
"""
from __future__ import annotations

import json
import os
import random
import signal
import sys

from c_header import function_names, load

RETURNS_NO_STATUS = {"cuflash_abi_version", "cuflash_last_cuda_error", "cuflash_kernel_count",
                     "cuflash_last_error_copy"}
BUFFER = 1 << 20  # for what positional functions point to
STRUCT = 1 << 16  # the largest struct_size
CPU_DEVICE = -1
DENSE, F32 = 1, 1
DRAWS = 150

INT32 = [-2**31, -3, -1, 0, 1, 2, 7, 99, 257, 2**31 - 1]
INT64 = [-2**63, -2**31, -1, 0, 1, 3, 2**31 - 1, 2**31, 2**62, 2**63 - 1]
FLOATS = [0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-45]
STRINGS = [b"", b"nonsense", b"%s%n%d", b"\xff\xfe", b"x" * 10000, b"reference", b"wmma"]


class Caller:
    def __init__(self, library: str, device: str):
        self.ffi, self.lib = load(library)
        self.on_cpu = device == "cpu"
        self.rng = random.Random(1)
        self.handle = self.ffi.NULL
        self.alive: list = []  # what a call's pointers lead to

    def open(self) -> None:
        if self.on_cpu:
            out = self.ffi.new("cuflash_handle_t*")
            assert self.lib.cuflash_create(out, CPU_DEVICE) == 0
            assert self.lib.cuflash_set_default_device(CPU_DEVICE) == 0
            self.handle = out[0]

    def memory(self, size: int):
        memory = self.ffi.new("char[]", size)
        self.alive.append(memory)
        return memory

    # ---- valid arguments, all extents 1 ------------------------------------------------------

    def tensor(self) -> dict:
        return {"data": self.memory(4096), "flags": DENSE, "dtype": F32}

    def valid(self, kind: str, decode: bool) -> dict:
        """Fields of a valid struct; what is not named is zero."""
        tensors = {
            "cuflash_problem_t": ("q", "o") if decode else ("q", "k", "v", "o"),
            "cuflash_gradients_t": ("d_o", "dq", "dk", "dv"),
            "cuflash_kv_cache_t": ("k", "v"),
            "cuflash_kv_append_t": ("k", "v"),
            "cuflash_merge_t": ("parts", "o"),
        }
        sizes = {
            "cuflash_problem_t": {"batch": 1, "heads_q": 1, "len_q": 1, "len_k": not decode,
                                  "head_dim": 8, "lse": self.memory(4096)},
            "cuflash_kv_cache_t": {"max_len": 1},
            "cuflash_kv_append_t": {"batch": 1, "heads_kv": 1, "len": 1, "head_dim": 8,
                                    "positions": self.memory(4096)},
            "cuflash_merge_t": {"num_parts": 1, "batch": 1, "heads": 1, "len": 1, "head_dim": 8,
                                "lse_parts": self.memory(4096)},
            "cuflash_weights_t": {"weights": self.memory(4096)},
        }
        fields = {name: self.tensor() for name in tensors.get(kind, ())}
        return {**fields, **sizes.get(kind, {})}

    def build(self, kind: str, fields: dict):
        """A struct in memory of the largest struct_size."""
        struct = self.ffi.cast(f"{kind}*", self.memory(STRUCT + 8))
        if hasattr(struct, "struct_size"):
            struct.struct_size = self.ffi.sizeof(kind)
        for name, value in fields.items():
            self.assign(struct, name, value)
        return struct

    def assign(self, struct, name: str, value) -> None:
        if isinstance(value, dict):
            for inner, inner_value in value.items():
                self.assign(getattr(struct, name), inner, inner_value)
            return
        kind = dict(self.ffi.typeof(struct[0] if self.is_pointer(struct) else struct).fields)[name]
        if kind.type.kind == "pointer":
            value = self.ffi.cast(kind.type, value)
        setattr(struct, name, value)

    def is_pointer(self, value) -> bool:
        return self.ffi.typeof(value).kind == "pointer"

    # ---- the calls of one function -----------------------------------------------------------

    def calls(self, name: str):
        """(description, arguments) of every call of a function."""
        types = self.ffi.typeof(getattr(self.lib, name)).args
        baseline = [self.baseline(name, kind) for kind in types]
        yield "zeros", [self.zero(kind) for kind in types]
        yield "valid", baseline
        for i, kind in enumerate(types):
            for label, value in self.spoilt(name, kind):
                yield f"argument {i} is {label}", [*baseline[:i], value, *baseline[i + 1:]]
        for draw in range(DRAWS if types else 0):
            yield f"draw {draw}", [self.drawn(name, kind) for kind in types]

    def zero(self, kind):
        return self.ffi.NULL if kind.kind in ("pointer", "function") else 0

    def baseline(self, name: str, kind):
        if kind.cname == "struct cuflash_handle *":
            return self.handle
        if self.is_struct_pointer(kind):
            return self.build(kind.item.cname, self.valid(kind.item.cname, "decode" in name))
        if kind.cname == "struct CUstream_st *" or kind.kind == "function":
            return self.ffi.NULL
        if kind.kind == "pointer":
            if kind.item.cname == "char":
                return self.memory(STRUCT)  # a buffer, or the string ""
            return self.ffi.cast(kind, self.memory(BUFFER))
        return 1 if kind.cname != "size_t" else 4096

    def is_struct_pointer(self, kind) -> bool:
        return kind.kind == "pointer" and kind.item.kind == "struct" and bool(kind.item.fields)

    def spoilt(self, name: str, kind):
        """(label, value) of each bad or unusual value of one argument beside valid others."""
        if self.is_struct_pointer(kind):
            yield "NULL", self.ffi.NULL
            yield from self.spoilt_structs(kind.item.cname, "decode" in name)
        elif kind.kind == "pointer" and self.is_data(kind):
            yield "NULL", self.ffi.NULL
            if name.startswith("cuflash_attention_"):
                yield "odd", self.ffi.cast(kind, self.memory(BUFFER) + 1)
            if kind.item.cname == "char":
                for text in STRINGS:
                    yield repr(text[:20]), self.kept(text.ljust(STRUCT, b"\0"))
        elif kind.cname == "size_t":
            # Only the init functions can refuse a size; elsewhere it tells how large memory is.
            refusable = [STRUCT, STRUCT + 8, 2**64 - 1] if name.endswith("_init") else []
            for value in [0, 1, 7, 8, 12, *refusable]:
                yield value, value
        elif kind.cname == "float":
            for value in FLOATS:
                yield value, value
        elif kind.kind == "primitive":
            # Up to 257 the memory behind the pointers is large enough.
            for value in INT32:
                if value < 1000 or not self.has_data(name):
                    yield value, value

    def is_data(self, kind) -> bool:
        return kind.cname not in ("struct cuflash_handle *", "struct CUstream_st *")

    def has_data(self, name: str) -> bool:
        types = self.ffi.typeof(getattr(self.lib, name)).args
        return sum(kind.kind == "pointer" and self.is_data(kind) for kind in types) > 1

    def spoilt_structs(self, kind: str, decode: bool):
        for label, fields in self.spoilt_fields(kind):
            struct = self.build(kind, self.valid(kind, decode))
            for name, value in fields.items():
                self.assign(struct, name, value)
            yield label, struct
        size = self.ffi.sizeof(kind)
        for tail in (0, 1):
            struct = self.build(kind, self.valid(kind, decode))
            if hasattr(struct, "struct_size"):
                struct.struct_size = size + 64
                self.ffi.cast("char*", struct)[size + 60] = bytes([tail])
                yield f"longer with a tail of {tail}", struct

    def spoilt_fields(self, kind: str, path: str = ""):
        """(label, fields): one field, also of an inner tensor, set to one bad or unusual value."""
        for name, field in self.ffi.typeof(kind).fields:
            type_ = field.type
            if type_.kind == "struct":
                for label, inner in self.spoilt_fields(type_.cname, f"{name}."):
                    yield label, {name: inner}
                continue
            for value in self.spoilt_values(name, type_):
                literal = {"flags": 0} if path and name.endswith("_stride") else {}
                yield f"{path}{name}={value}"[:60], {name: value, **literal}

    def spoilt_values(self, name: str, kind) -> list:
        if kind.kind == "pointer":
            memory = self.memory(4096)
            if kind.item.cname == "char":
                return [self.ffi.NULL, *(self.kept(text) for text in STRINGS)]
            return [self.ffi.NULL, memory, memory + 1]
        if kind.kind == "array":
            return [[1] + [0] * (kind.length - 1)]
        if name == "struct_size":
            return [0, 1, 4, 8, 64, 68, STRUCT, STRUCT + 8, 2**32 - 1]
        if kind.cname == "uint32_t":
            return [1 << bit for bit in range(32)] + [2**32 - 1]
        if kind.cname == "float":
            return FLOATS
        # With all extents 1 no stride or offset is ever added; a larger extent would be a lie.
        free = ("stride", "offset", "window", "seed", "align", "mask", "mode", "layout", "bits",
                "dtype", "splits", "margin", "arch")
        values = INT64 if "64" in kind.cname else INT32
        if kind.cname.startswith("u"):
            return [value for value in values if value >= 0]
        return [value for value in values if value <= 0 or any(word in name for word in free)]

    def kept(self, text: bytes):
        memory = self.ffi.new("char[]", text)
        self.alive.append(memory)
        return memory

    def drawn(self, name: str, kind):
        """Anything at all, without a single pointer to data: nothing may be read or written."""
        pick = self.rng.choice
        if kind.cname == "struct cuflash_handle *":
            return self.handle
        if self.is_struct_pointer(kind):
            return self.build(kind.item.cname, self.drawn_fields(kind.item.cname))
        if kind.kind in ("pointer", "function"):
            return self.ffi.NULL
        if kind.cname == "float":
            return pick(FLOATS)
        if kind.cname == "size_t":
            return pick([0, 0, 1, 8, 4096]) if not name.endswith("_init") else pick([0, 8, 2**40])
        return pick(INT64 if "64" in kind.cname else INT32)

    def drawn_fields(self, kind: str) -> dict:
        fields = {}
        for name, field in self.ffi.typeof(kind).fields:
            if name == "struct_size" or field.type.kind in ("pointer", "array"):
                continue
            if self.rng.random() < 0.5:
                continue  # zero, the default
            if field.type.kind == "struct":
                fields[name] = self.drawn_fields(field.type.cname)
            elif field.type.cname == "float":
                fields[name] = self.rng.choice(FLOATS)
            elif field.type.cname == "uint32_t":
                fields[name] = self.rng.choice([0, 1, 2, 3, 19, 1 << 31])
            else:
                # Mostly small, or nothing would get past the first check.
                values = INT64 if "64" in field.type.cname else INT32
                fields[name] = self.rng.choice([1, 2, 3, 8, *values])
                if field.type.cname.startswith("u"):
                    fields[name] = abs(fields[name])
        return fields

    # ---- running -----------------------------------------------------------------------------

    def run(self, name: str, report) -> None:
        function = getattr(self.lib, name)
        returns_status = (self.ffi.typeof(function).result.cname == "int32_t"
                          and name not in RETURNS_NO_STATUS)
        self.open()
        for description, arguments in self.calls(name):
            report({"begin": description})
            if name == "cuflash_destroy":
                self.open()  # the last call freed it
                arguments = [self.handle if description != "zeros" else self.ffi.NULL]
            result = function(*arguments)
            if returns_status:
                message = self.ffi.string(self.lib.cuflash_last_error()).decode(errors="replace")
                report({"call": [description, result, message]})


def run_in_child(caller: Caller, name: str) -> dict:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            def report(entry: dict) -> None:
                print(json.dumps(entry), file=pipe, flush=True)
            signal.alarm(120)
            try:
                caller.run(name, report)
                code = 0
            except BaseException as error:  # noqa: B036  (the child must not run the parent's code)
                report({"begin": f"{type(error).__name__}: {error}"})
                code = 1
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        entries = [json.loads(line) for line in pipe]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    died = None if code == 0 else signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {
        "died": died,
        "last": [entry["begin"] for entry in entries if "begin" in entry][-1:],
        "calls": [entry["call"] for entry in entries if "call" in entry],
    }


def main() -> None:
    caller = Caller(*sys.argv[1:])
    names = function_names(caller.lib)
    print(json.dumps({name: run_in_child(caller, name) for name in names}))


if __name__ == "__main__":
    main()
