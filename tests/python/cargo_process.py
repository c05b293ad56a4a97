"""cargo for the tests: the crates, built below build/ with the library under test."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import cuflash
from conftest import BUILD, ROOT

CRATES = ROOT / "bindings" / "rust"
TARGET = BUILD / "rust"


def _version() -> tuple[int, ...]:
    if not shutil.which("cargo"):
        return ()
    output = subprocess.run(["cargo", "--version"], text=True, capture_output=True).stdout
    return tuple(map(int, re.findall(r"\d+", output)[:2]))


_NEEDED = tuple(map(int, re.search(
    r'rust-version = "(\d+)\.(\d+)"', (CRATES / "Cargo.toml").read_text()).groups()))
FOUND = _version() >= _NEEDED
MISSING = f"no cargo of version {'.'.join(map(str, _NEEDED))} or newer"


def link_library(directory: Path) -> Path:
    """The library in the directory, under the names of linkers and loaders."""
    for name in ("libcuflash.so", "libcuflash.so.0"):
        (directory / name).symlink_to(Path(cuflash.library_path()).resolve())
    return directory


def cargo(library: Path, *arguments: str, crates: Path = CRATES, **environment: str) -> subprocess.CompletedProcess:
    """library: the directory that link_library() made."""
    environment = {**os.environ, "CUFLASH_LIB_DIR": str(library), "LD_LIBRARY_PATH": str(library),
                   "CARGO_TARGET_DIR": str(TARGET), "CARGO_PROFILE_DEV_DEBUG": "0", **environment}
    command, *rest = arguments
    return subprocess.run(["cargo", command, "--offline", "--locked", *rest], cwd=crates,
                          env=environment, text=True, capture_output=True)


def must_pass(run: subprocess.CompletedProcess) -> str:
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
