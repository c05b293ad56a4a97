#!/usr/bin/env python3
"""cuflash.hpp and the older include path in C++11 to C++20, by every compiler found, without a warning:
the headers alone, the examples on the CPU device, and a program for releases up to 0.6.

    dialects.py SOURCE_FOLDER LIBRARY [--cuda]

--cuda: the library is built with CUDA. The older program then has to work where there is a GPU;
elsewhere it has to end with the library's error. It needs CUDA's headers: without a toolkit that
part is skipped.
"""
from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILERS = ["g++", "clang++"]
DIALECTS = ["c++11", "c++14", "c++17", "c++20"]
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wold-style-cast", "-Werror"]
# The examples cast as people do.
USUAL = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


class Failed(Exception):
    pass


def run(command: list, status: int = 0, **options) -> subprocess.CompletedProcess:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    if done.returncode != status:
        raise Failed(f"{' '.join(map(str, command))}\nended with {done.returncode}, "
                     f"not {status}:\n{done.stdout}{done.stderr}")
    return done


def cuda_toolkit() -> Path | None:
    """The folder with include/ and lib64/, beside nvcc."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    root = Path(nvcc).resolve().parents[1] if nvcc else None
    return root if root and (root / "include" / "cuda_runtime.h").exists() else None


def have_gpu() -> bool:
    try:
        cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return False
    return not cuda.cuInit(0) and not cuda.cuDeviceGetCount(ctypes.byref(count)) and count.value > 0


class Checks:
    def __init__(self, source: Path, library: Path, built_with_cuda: bool, work: Path):
        self.source, self.library, self.work = source, library, work
        self.expect_gpu = built_with_cuda and have_gpu()
        self.include = f"-I{source / 'include'}"
        self.link = [library, f"-Wl,-rpath,{library.parent}"]

    def header_alone(self, command: list) -> None:
        for options in ([], ["-fno-exceptions", "-fno-rtti"]):
            trace = run([*command, *STRICT, *options, self.include, "-x", "c++", "-fsyntax-only",
                         "-H", "-"],
                        input="#include <cuflash.hpp>\n"
                              "int use() { cuflash::Handle h; return cuflash_trim(h); }\n").stderr
            included = {Path(line.split()[-1]).name for line in trace.splitlines()
                        if line.startswith(".")}
            if "cuflash.h" not in included or any(name.startswith("cuda") for name in included):
                raise Failed(f"it includes {sorted(included)}")
        run([*command, *STRICT, self.include, "-x", "c++", "-fsyntax-only", "-"],
            input="#include <cuflash/flash_attention.h>\n")

    def examples(self, command: list) -> None:
        for example in sorted((self.source / "examples" / "cpp").glob("*.cpp")):
            program = self.work / "example"
            run([*command, *USUAL, self.include, example, "-o", program, *self.link])
            output = run([program]).stdout
            if "largest error" not in output:
                raise Failed(f"{example.name} printed {output!r}")

    def older_program(self, command: list, toolkit: Path) -> None:
        cuda = ["-isystem", toolkit / "include"]
        for order in ([], ["-DCUFLASH_HEADER_LAST"]):
            run([*command, *STRICT, *order, self.include, *cuda, HERE / "cuda_types.cpp",
                 "-fsyntax-only"])
        program = self.work / "older"
        run([*command, *USUAL, self.include, *cuda, HERE / "older_program.cpp", "-o", program,
             *self.link, f"-L{toolkit / 'lib64'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"])
        self.run_older(program)

    def older_program_by_nvcc(self, toolkit: Path) -> None:
        program = self.work / "older_nvcc"
        run([toolkit / "bin" / "nvcc", "-std=c++17", "-x", "cu", "-Xcompiler=-Wall,-Wextra,-Werror",
             self.include, HERE / "older_program.cpp", "-o", program, f"-L{self.library.parent}",
             "-lcuflash", f"-Xlinker=-rpath={self.library.parent}"])
        self.run_older(program)

    def run_older(self, program: Path) -> None:
        environment = {name: value for name, value in os.environ.items()
                       if name not in ("CUFLASH_DEVICE", "CUFLASH_KERNEL")}
        if self.expect_gpu:
            if "done" not in run([program], env=environment).stdout:
                raise Failed("the older program did not say that it was done")
        else:
            message = run([program], status=1, env=environment).stderr
            if not message.startswith("error: forward: ") or "Unknown error" in message:
                raise Failed(f"no clear error without a GPU: {message!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("library", type=Path)
    parser.add_argument("--cuda", action="store_true")
    arguments = parser.parse_args()
    toolkit = cuda_toolkit()
    passed = failed = 0

    with tempfile.TemporaryDirectory() as work:
        checks = Checks(arguments.source, arguments.library, arguments.cuda, Path(work))

        def check(name: str, function, *parameters) -> None:
            nonlocal passed, failed
            try:
                function(*parameters)
                passed += 1
                print(f"{name}: ok")
            except Failed as wrong:
                failed += 1
                print(f"{name}: {wrong}")

        for compiler in COMPILERS:
            if not shutil.which(compiler):
                print(f"{compiler}: skipped, not installed")
                continue
            for dialect in DIALECTS:
                command = [compiler, f"-std={dialect}"]
                check(f"{compiler} {dialect} headers alone", checks.header_alone, command)
                check(f"{compiler} {dialect} examples", checks.examples, command)
                if toolkit:
                    check(f"{compiler} {dialect} older program", checks.older_program, command,
                          toolkit)
        if toolkit:
            check("nvcc c++17 older program", checks.older_program_by_nvcc, toolkit)
        else:
            print("older program: skipped, no CUDA toolkit here")
    print(f"{passed} passed, {failed} failed; the older program "
          + ("ran on the GPU" if checks.expect_gpu else "had no GPU to run on"))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
