#!/usr/bin/env python3
"""Mutations of the header, each with the verdict that it deserves from compare_api.py, and what abidiff
says of a library built from it. What abidiff does not see is in the table as BLIND: there the JSON is
the only guard. Exit status 77: no libclang."""
from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import compare_api
import compare_libraries

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "include" / "cuflash.h").read_text()
sys.path.insert(0, str(ROOT / "bindings"))
END = "#ifdef __cplusplus\n} /* extern"

BREAK, FINE = "break", "fine"
BLIND = "blind"  # a break that abidiff finds equal


def replaced(*pairs: tuple[str, str]) -> str:
    """The header with patterns replaced, each of which it must hold exactly once."""
    text = HEADER
    for pattern, new in pairs:
        text, count = re.subn(pattern, new, text, flags=re.DOTALL)
        assert count == 1, f"{pattern!r} is in the header {count} times"
    return text


def added(declaration: str) -> str:
    return replaced((re.escape(END), f"{declaration}\n{END}"))


WEIGHTS_BATCH, WEIGHTS_HEAD = (r"(float\* weights;[^\n]*\n)([^\n]*\n)", r"([^\n]*\n)")
MUTATIONS = {  # what is done to the header: (the result, verdict of the JSON, verdict of abidiff)
    "nothing": (HEADER, FINE, FINE),
    "function removed": (
        replaced((r"CUFLASH_API cuflash_status_t cuflash_trim\([^;]*;", "")), BREAK, BREAK),
    "function added": (
        added("/** New. */\nCUFLASH_API int32_t cuflash_new(void);"), FINE, FINE),
    "argument type changed": (
        replaced((r"(cuflash_option_bounds\()int32_t key", r"\1int64_t key")), BREAK, BREAK),
    "argument became const": (
        replaced((r"(cuflash_workspace_prepare\([^;]*?)void\* workspace", r"\1const void* workspace")),
        BREAK, BLIND),
    "argument added": (
        replaced((r"(cuflash_trim\(cuflash_handle_t handle)", r"\1, int32_t level")), BREAK, BREAK),
    "result type changed": (
        replaced((r"int32_t cuflash_kernel_count", "int64_t cuflash_kernel_count")), BREAK, BREAK),
    "callback's argument changed": (
        replaced((r"(cuflash_log_fn\)\(void\* user, )int32_t", r"\1int64_t")), BREAK, BREAK),
    "field removed": (
        replaced((r"  int64_t num_rows;[^\n]*\n", "")), BREAK, BREAK),
    "field removed before another": (
        replaced((r"  float\* weights;[^\n]*\n", "")), BREAK, BREAK),
    "fields swapped": (
        replaced((WEIGHTS_BATCH + WEIGHTS_HEAD, r"\1\3\2")), BREAK, BREAK),
    "field's type changed": (
        replaced((r"int64_t num_rows;", "uint64_t num_rows;")), BREAK, BREAK),
    "field inserted": (
        replaced((r"(  float\* weights;)", r"  int64_t extra; /**< new */\n\1")), BREAK, BREAK),
    "field appended to a sized struct": (
        replaced((r"\} cuflash_weights_t;", "  int64_t extra; /**< new */\n} cuflash_weights_t;")),
        FINE, FINE),
    "field appended to a struct without size": (
        replaced((r"\} cuflash_tensor_t;", "  int64_t extra; /**< new */\n} cuflash_tensor_t;")),
        BREAK, BREAK),
    "enum value changed": (
        replaced((r"CUFLASH_LOG_CALLS = 3", "CUFLASH_LOG_CALLS = 4")), BREAK, BLIND),
    "enum values swapped": (
        replaced((r"CUFLASH_F16 = 2", "CUFLASH_F16 = 3"), (r"CUFLASH_BF16 = 3", "CUFLASH_BF16 = 2")),
        BREAK, BLIND),
    "enum constant removed": (
        replaced((r"  CUFLASH_INT8 = 6,[^\n]*\n", "")), BREAK, BLIND),
    "enum constant added": (
        replaced((r"(  CUFLASH_LOG_CALLS = 3)", r"  CUFLASH_LOG_NEW = 4, /**< new */\n\1")),
        FINE, FINE),
    "enum removed": (
        replaced((r"/\*\* Log levels.*?\n\};", "")), BREAK, BLIND),
    "macro removed": (
        replaced((r"#define CUFLASH_VERSION_PATCH[^\n]*\n", "")), BREAK, BLIND),
}


def build(header: str, folder: Path, name: str, debug: str = "-g") -> tuple[dict, Path]:
    """The JSON of a header, and a library whose functions are empty but have its types and versions."""
    folder = folder / name
    folder.mkdir()
    (folder / "cuflash.h").write_text(header)
    from generator import version_script  # these need libclang
    from generator.header import read_header

    api = read_header(folder / "cuflash.h")
    (folder / "cuflash.map").write_text(version_script.emit(api))
    declared = re.findall(r"^CUFLASH_API ([^;]*\));", header, flags=re.DOTALL | re.MULTILINE)
    assert len(declared) == len(api["functions"])
    bodies = [f"{text} {{ {'' if text.startswith('void ') else 'return 0;'} }}" for text in declared]
    (folder / "stub.c").write_text("\n".join(["#include \"cuflash.h\"", *bodies]))
    library = folder / "libcuflash.so.0"
    subprocess.run(
        ["cc", debug, "-w", "-shared", "-fPIC", "-Wl,-soname,libcuflash.so.0",
         f"-Wl,--version-script={folder / 'cuflash.map'}", folder / "stub.c", "-o", library],
        check=True)
    return api, library


def main() -> int:
    if not importlib.util.find_spec("clang"):
        print("skipped: no libclang (tests/requirements.txt)")
        return 77
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        api, library = build(HEADER, folder, "baseline")
        baseline, stripped = folder / "baseline.abi", build(HEADER, folder, "stripped", "-g0")[1]
        no_abidiff = compare_libraries.why_blind(library)
        if no_abidiff:
            print(f"without abidiff's part: {no_abidiff}")
        else:
            compare_libraries.dump(library, baseline)
            if compare_libraries.unseen(baseline, api):
                failed += 1
                print("FAILED: abidw does not see every function")
            if not compare_libraries.why_blind(stripped):
                failed += 1
                print("FAILED: a library without debug information passes as one that has it")
        for number, (name, (header, json_verdict, abidiff_verdict)) in enumerate(MUTATIONS.items()):
            now, mutated = build(header, folder, str(number))
            verdicts = {"json": (BREAK if compare_api.breaks(api, now) else FINE, json_verdict)}
            if not no_abidiff:
                same = not compare_libraries.difference(baseline, api, mutated, now)
                expected = FINE if abidiff_verdict == BLIND else abidiff_verdict
                verdicts["abidiff"] = (FINE if same else BREAK, expected)
            wrong = [f"{tool} says {got}, not {want}"
                     for tool, (got, want) in verdicts.items() if got != want]
            failed += bool(wrong)
            blind = " (abidiff is blind)" if abidiff_verdict == BLIND else ""
            print(f"{name}: {'; '.join(wrong) or json_verdict + blind}")
    print(f"{len(MUTATIONS)} mutations, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
