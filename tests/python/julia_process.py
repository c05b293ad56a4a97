"""Julia for the tests: that of the PATH, or where tools/debian_julia.sh puts one."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import cuflash
from conftest import BUILD, ROOT

PACKAGE = ROOT / "bindings" / "julia" / "CUFlash.jl"


def _find() -> str | None:
    """A julia of 1.5 or newer."""
    for julia in (shutil.which("julia"), ROOT / ".venv" / "julia" / "julia"):
        if julia and os.path.exists(julia):
            output = subprocess.run([julia, "--version"], text=True, capture_output=True).stdout
            if tuple(map(int, re.findall(r"\d+", output)[:2])) >= (1, 5):
                return str(julia)
    return None


JULIA = _find()
MISSING = "no julia 1.5 or newer"


def julia(*arguments: str | Path, package: Path = PACKAGE, **environment: str) -> str:
    """What a Julia program prints; an error if it fails. Compiled packages stay below build/."""
    run = try_julia(*arguments, package=package, **environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def try_julia(*arguments: str | Path, package: Path = PACKAGE,
              **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CUFLASH_LIBRARY": cuflash.library_path(),
                   "JULIA_DEPOT_PATH": str(BUILD / "julia"), "JULIA_NUM_THREADS": "2",
                   **environment}
    # -O0: the compiler takes most of the time.
    return subprocess.run([JULIA, "--startup-file=no", "-O0", f"--project={package}", *arguments],
                          env=environment, text=True, capture_output=True)
