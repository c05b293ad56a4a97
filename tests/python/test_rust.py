"""The Rust crates: the raw layer is what bindgen makes of the header, and cargo's own tests, lints,
documentation and example pass. Skipped where there is no cargo, or one older than the crates need.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import rust_items
from cargo_process import CRATES, FOUND, MISSING, cargo, link_library, must_pass
from conftest import ROOT

BINDINGS = CRATES / "cuflash-sys" / "src" / "bindings.rs"
HEADER = ROOT / "include" / "cuflash.h"

if not FOUND:
    pytest.skip(MISSING, allow_module_level=True)

needs_bindgen = pytest.mark.skipif(not shutil.which("bindgen"), reason="bindgen is not installed")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return link_library(tmp_path_factory.mktemp("lib"))


# ---- the raw layer -----------------------------------------------------------------------------


@needs_bindgen
def test_raw_layer_is_what_bindgen_writes(tmp_path, api):
    theirs = rust_items.items(rust_items.bindgen(HEADER, tmp_path / "theirs.rs"), tmp_path)
    assert rust_items.items(BINDINGS, tmp_path) == theirs
    constants = [value for enum in api["enums"] for value in enum["values"]]
    fields = [field for struct in api["structs"] for field in struct["fields"]]
    for declared in (*api["functions"], *constants, *api["typedefs"], *api["structs"]):
        assert declared["name"] in theirs
    assert len(theirs) > len(api["functions"]) + len(constants) + len(fields)


@needs_bindgen
def test_differences_from_bindgen_are_found(tmp_path):
    text = HEADER.read_text()
    for old, new in [("CUFLASH_BF16 = 3", "CUFLASH_BF16 = 9"),
                     ("int32_t rank;", "uint32_t rank;"),
                     ("cuflash_trim(cuflash_handle_t handle)",
                      "cuflash_trim(cuflash_handle_t handle, int64_t bytes)")]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    header = tmp_path / "cuflash.h"
    header.write_text(text)
    theirs = rust_items.items(rust_items.bindgen(header, tmp_path / "theirs.rs"), tmp_path)
    ours = rust_items.items(BINDINGS, tmp_path)
    different = {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)}
    assert different == {"CUFLASH_BF16", "cuflash_kernel_info_s.rank", "cuflash_trim"}


# ---- finding the library -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def build_script(tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("build_script") / "build"
    must_pass(subprocess.run(
        ["rustc", "--edition=2021", CRATES / "cuflash-sys" / "build.rs", "-o", program],
        text=True, capture_output=True))
    return program


def searched(build_script: Path, **environment: str) -> list[str]:
    """The directories that the build script gives to the linker."""
    kept = {name: value for name, value in os.environ.items() if name != "CUFLASH_LIB_DIR"}
    output = must_pass(subprocess.run([build_script], env={**kept, **environment}, text=True,
                                      capture_output=True))
    assert "cargo:rustc-link-lib=dylib=cuflash" in output.splitlines()
    return re.findall(r"^cargo:rustc-link-search=native=(.*)$", output, re.MULTILINE)


def test_library_of_the_environment(build_script):
    assert searched(build_script, CUFLASH_LIB_DIR="/some/where", PKG_CONFIG="false") == [
        "/some/where"]


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="pkg-config is not installed")
def test_library_of_pkg_config(build_script, tmp_path):
    (tmp_path / "cuflash.pc").write_text(
        "libdir=/opt/cuflash/lib\nName: cuflash\nDescription: -\nVersion: 0.7.0\n"
        "Libs: -L${libdir} -lcuflash\n")
    assert searched(build_script, PKG_CONFIG_PATH=str(tmp_path)) == ["/opt/cuflash/lib"]


def test_library_of_the_system(build_script):
    for missing in ("false", "no-such-program"):
        assert searched(build_script, PKG_CONFIG=missing, CUFLASH_LIB_DIR="") == []


# ---- cargo -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cargo_test(library) -> subprocess.CompletedProcess:
    return cargo(library, "test", "--workspace", "--", "--show-output")


def test_cargo_test(cargo_test):
    output = must_pass(cargo_test)
    results = re.findall(r"test result: ok\. (\d+) passed; 0 failed; 0 ignored", output)
    assert len(results) == 3  # the suite, and the READMEs of both crates
    assert all(int(passed) > 0 for passed in results)


def test_on_a_gpu(cargo_test):
    output = must_pass(cargo_test)
    reasons = re.findall(r"^skipped: (.*)$", output, re.MULTILINE)
    if reasons:
        assert len(reasons) == len(re.findall(r"^test gpu::\w+ \.\.\. ok$", output, re.MULTILINE))
        pytest.skip(f"Rust on a GPU: {reasons[0]}")


def test_example(library):
    assert "largest error" in must_pass(cargo(library, "run", "-q", "--example", "attention"))


def test_documentation(library):
    must_pass(cargo(library, "doc", "--no-deps", RUSTDOCFLAGS="-D warnings"))


@pytest.mark.skipif(not shutil.which("cargo-clippy"), reason="clippy is not installed")
def test_clippy(library):
    must_pass(cargo(library, "clippy", "--workspace", "--all-targets", "--", "-D", "warnings"))


@pytest.mark.skipif(not shutil.which("cargo-fmt"), reason="rustfmt is not installed")
def test_format():
    must_pass(subprocess.run(["cargo", "fmt", "--all", "--check"], cwd=CRATES, text=True,
                             capture_output=True))
