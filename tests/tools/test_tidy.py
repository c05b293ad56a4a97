"""tools/tidy.py finds what .clang-tidy asks for, in host and CUDA sources, and says where."""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc")

if not shutil.which("clang-tidy-22"):
    pytest.skip("clang-tidy-22 is not installed", allow_module_level=True)

HOST = """
#include <cstdlib>
namespace cuflash {
int level(const char* text) { return std::atoi(text); }
}  // namespace cuflash
"""
CUDA = """
namespace cuflash {
__global__ void kernel(int* out) {
  int BadName = static_cast<int>(threadIdx.x);
  out[0] = BadName;
}
}  // namespace cuflash
"""
CLEAN = "namespace cuflash {\nint one() { return 1; }\n}  // namespace cuflash\n"


def tidy(name: str, text: str, compiler: str) -> subprocess.CompletedProcess:
    """Runs the tool on a build folder with one generated source; below the root, for its .clang-tidy."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        source = Path(folder) / "generated" / name
        source.parent.mkdir()
        source.write_text(text)
        entry = {"directory": folder, "file": str(source),
                 "command": f"{compiler} -std=c++17 -fno-gnu-unique -c {source} -o x.o"}
        (Path(folder) / "compile_commands.json").write_text(json.dumps([entry]))
        return subprocess.run([sys.executable, ROOT / "tools" / "tidy.py", folder], text=True,
                              capture_output=True)


def test_finding_in_a_host_source():
    run = tidy("host.cpp", HOST, "g++")
    assert run.returncode == 1
    assert "host.cpp:4:" in run.stdout and "cert-err34-c" in run.stdout


@pytest.mark.skipif(not NVCC, reason="no nvcc")
def test_finding_in_a_cuda_source():
    run = tidy("unit_f16_d64.cu", CUDA, NVCC)
    assert run.returncode == 1
    assert "unit_f16_d64.cu:4:" in run.stdout and "readability-identifier-naming" in run.stdout
    assert "clang-diagnostic-error" not in run.stdout


def test_clean_source():
    run = tidy("clean.cpp", CLEAN, "g++")
    assert run.returncode == 0, run.stdout
    assert "1 of 1 sources are clean" in run.stdout


def test_source_that_does_not_compile():
    run = tidy("broken.cpp", "int f() { return undeclared; }\n", "g++")
    assert run.returncode == 1 and "undeclared" in run.stdout
