"""A libcuflash that computes nothing, of any version: what bindings do with another library."""
from __future__ import annotations

import subprocess
from pathlib import Path

from conftest import ROOT


def build_stub(directory: Path, api: dict, minor: int = 7, **returned: int) -> Path:
    """libcuflash.so.0 in the directory: version 0.`minor`.0, every function of the header, which
    returns 0 or what is given for it."""
    lines = ["void cuflash_version(int *major, int *minor, int *patch) {",
             f"  *major = 0; *minor = {minor}; *patch = 0;", "}"]
    lines += [f"long {function['name']}(void) {{ return {returned.get(function['name'], 0)}; }}"
              for function in api["functions"] if function["name"] != "cuflash_version"]
    library = directory / "libcuflash.so.0"
    subprocess.run(
        ["gcc", "-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{library.name}",
         f"-Wl,--version-script={ROOT / 'src' / 'api' / 'cuflash.map'}", "-", "-o", library],
        input="\n".join(lines) + "\n", check=True, text=True)
    return library
