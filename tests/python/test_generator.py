"""bindings/generate.py: the committed outputs are current, a changed header regenerates and its
outputs work, and what an ABI must not hold is refused."""
from __future__ import annotations

import json
import shutil
import subprocess
import sys

import cuflash
import pytest
import rust_items
from arrays import run_python
from conftest import ROOT
from julia_process import JULIA, MISSING, PACKAGE, julia

HEADER = (ROOT / "include" / "cuflash.h").read_text()
END = "#ifdef __cplusplus\n} /* extern"


def generate(*arguments) -> subprocess.CompletedProcess:
    script = ROOT / "bindings" / "generate.py"
    return subprocess.run([sys.executable, script, *arguments], text=True, capture_output=True)


def changed(*replacements: tuple) -> str:
    text = HEADER
    for old, new in replacements:
        assert text.count(old) == 1, f"{old!r} is in the header {text.count(old)} times"
        text = text.replace(old, new)
    return text


def appended(declaration: str) -> str:
    return changed((END, declaration + "\n" + END))


@pytest.fixture
def run_on(tmp_path):
    """Generates from a header's text; the outputs are below tmp_path."""

    def run(text: str) -> subprocess.CompletedProcess:
        header = tmp_path / "cuflash.h"
        header.write_text(text)
        return generate("--header", header, "--output", tmp_path)

    return run


def test_committed_outputs_are_current():
    check = generate("--check")
    assert check.returncode == 0, check.stderr


def test_check_finds_a_stale_output(tmp_path):
    assert generate("--output", tmp_path).returncode == 0
    assert generate("--output", tmp_path, "--check").returncode == 0
    script = tmp_path / "src" / "api" / "cuflash.map"
    script.write_text(script.read_text().replace("    cuflash_trim;\n", ""))
    check = generate("--output", tmp_path, "--check")
    assert check.returncode == 1
    assert "+    cuflash_trim;" in check.stderr


def with_new_things() -> str:
    """The header with a new function, field, constant, enum and struct."""
    return changed(
        ("} cuflash_weights_t;", "  float* extra; /**< a new field */\n} cuflash_weights_t;"),
        ("  CUFLASH_LOG_CALLS = 3 ", "  CUFLASH_LOG_NOISE = 4,\n  CUFLASH_LOG_CALLS = 3 "),
        (END, """
/** A new enum. */
enum cuflash_colour { CUFLASH_RED = 1, /**< red */ CUFLASH_BLUE = -2 };
/** A new struct. */
typedef struct cuflash_sample {
  uint32_t struct_size; /**< its size */
  int32_t colours[3];   /**< enum cuflash_colour */
  const char* name;     /**< its name */
} cuflash_sample_t;
/** A new function, with "quotes". */
CUFLASH_API cuflash_status_t cuflash_sample_take(cuflash_sample_t* sample, float weight);
""" + END))


def test_changed_header(run_on, tmp_path):
    """What is new comes out everywhere."""
    run = run_on(with_new_things())
    assert run.returncode == 0, run.stderr
    api = json.loads((tmp_path / "bindings" / "cuflash.json").read_text())
    assert api["functions"][-1]["name"] == "cuflash_sample_take"
    assert "    cuflash_sample_take;" in (tmp_path / "src/api/cuflash.map").read_text()
    compile_asserts = subprocess.run(
        ["gcc", "-std=c11", "-fsyntax-only", f"-I{tmp_path}",
         tmp_path / "tests" / "abi" / "layout_asserts.c"], text=True, capture_output=True)
    assert compile_asserts.returncode == 0, compile_asserts.stderr

    package = tmp_path / "package" / "cuflash"
    shutil.copytree(ROOT / "bindings" / "python" / "cuflash", package,
                    ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(tmp_path / "bindings/python/cuflash/_raw.py", package / "_raw.py")
    imported = run_python(f"""
import sys
sys.path.insert(0, {str(package.parent)!r})
import cuflash
from cuflash import raw
assert cuflash.__file__.startswith({str(package)!r})
assert raw.CUFLASH_LOG_NOISE == 4 and raw.cuflash_colour(-2) is raw.CUFLASH_BLUE
assert raw.cuflash_weights_t.new(extra=1).extra == 1
sample = raw.cuflash_sample_t.new(name=b"x", colours=(1, 2, 3))
assert (sample.struct_size, sample.name, list(sample.colours)) == (24, b"x", [1, 2, 3])
assert raw.cuflash_sample_take.__doc__ == 'A new function, with "quotes".'
try:
    raw.cuflash_sample_take(sample, 1.0)
except cuflash.LibraryError as error:
    assert "too old" in str(error) and "cuflash_sample_take" in str(error)
else:
    raise AssertionError("the library cannot have this function")
""", CUFLASH_LIBRARY=cuflash.library_path())
    assert imported.returncode == 0, imported.stderr


@pytest.mark.skipif(not shutil.which("rustc"), reason="rustc is not installed")
def test_changed_header_in_rust(run_on, tmp_path):
    """The file compiles, with its asserts of sizes and offsets, and has what is new."""
    assert run_on(with_new_things()).returncode == 0
    crates = tmp_path / "bindings" / "rust"
    found = rust_items.items(crates / "cuflash-sys" / "src" / "bindings.rs", tmp_path)
    assert found["cuflash_sample_take"] == \
        'unsafe extern "C" fn(*mut cuflash_sample, f32) -> i32'
    assert found["cuflash_sample.colours"] == "[i32; 3], 12 bytes at 4"
    assert found["cuflash_weights.extra"].startswith("*mut f32, 8 bytes at ")
    assert (found["CUFLASH_BLUE"], found["CUFLASH_LOG_NOISE"]) == ("-2", "4")
    assert "sys::CUFLASH_LOG_NOISE => Self::Noise" in \
        (crates / "cuflash" / "src" / "enums.rs").read_text()


@pytest.mark.skipif(JULIA is None, reason=MISSING)
def test_changed_header_in_julia(run_on, tmp_path):
    """What is new is there, and the sizes are what the header's are."""
    assert run_on(with_new_things()).returncode == 0
    package = tmp_path / "package"
    shutil.copytree(PACKAGE, package)
    shutil.copytree(tmp_path / "bindings" / "julia" / "CUFlash.jl", package, dirs_exist_ok=True)
    printed = julia("-e", f"""
        using CUFlash
        using CUFlash: Raw
        @assert startswith(pathof(CUFlash), {json.dumps(str(package))})
        sample = Raw.cuflash_sample_t(colours = (1, 2, 3))
        @assert (sample.struct_size, sample.colours, sample.name) == (24, (1, 2, 3), C_NULL)
        @assert Raw.CUFLASH_BLUE === Int32(-2) && Raw.CUFLASH_LOG_NOISE === Int32(4)
        @assert Raw.cuflash_weights_t(extra = Ptr{{Float32}}(8)).extra == Ptr{{Float32}}(8)
        try
            Raw.cuflash_sample_take(Ref(sample), 1.0)
        catch error
            print(error.msg)
        end
        include({json.dumps(str(package / "test" / "layouts.jl"))})
        @assert all(sizeof(type) == size for (type, size, _) in LAYOUTS)
    """, package=package)
    assert "too old: it has no cuflash_sample_take" in printed


def function(parameters: str, returned: str = "cuflash_status_t") -> str:
    return appended(f"/** New. */\nCUFLASH_API {returned} cuflash_new({parameters});")


def struct(fields: str) -> str:
    return appended(f"/** New. */\ntypedef struct cuflash_new {{ {fields} }} cuflash_new_t;")


REFUSED = {
    "hole between fields": (struct("int32_t a; /**< a */\n int64_t b; /**< b */\n"), "hole of 4"),
    "hole at the end": (struct("int64_t a; /**< a */\n int32_t b; /**< b */\n"), "hole of 4"),
    "bit-field": (struct("uint32_t a : 32; /**< a */\n"), "bit-field"),
    "union in a struct": (struct("union { int32_t a; float b; } u; /**< u */\n"), "cuflash_new"),
    "long in a struct": (struct("long a; /**< a */\n"), "long"),
    "char array": (struct("char a[8]; /**< a */\n"), "char"),
    "enum in a struct": (struct("enum cuflash_mask a; /**< a */\n int32_t b; /**< b */\n"), "enum"),
    "undocumented field": (struct("int64_t undocumented;\n"), "undocumented has no doc comment"),
    "enum parameter": (function("enum cuflash_mask mask"), "enum cuflash_mask"),
    "enum returned": (function("void", "enum cuflash_mask"), "enum cuflash_mask"),
    "bool parameter": (function("_Bool flag"), "Bool"),
    "long parameter": (function("long n"), "long"),
    "int parameter": (function("int n"), "int"),
    "double parameter": (function("double x"), "double"),
    "char by value": (function("char c"), "char"),
    "struct by value": (function("cuflash_tensor_t t"), "cuflash_tensor_t"),
    "pointer to an enum": (function("enum cuflash_mask* mask"), "enum cuflash_mask"),
    "pointer to a pointer": (function("float** p"), "float *"),
    "variadic": (function("int32_t n, ..."), "variadic"),
    "nameless parameter": (function("int32_t"), "without a name"),
    "no prototype": (function(""), "no prototype"),
    "undocumented function": (appended("CUFLASH_API void cuflash_new(void);"), "no doc comment"),
    "undocumented, first of a group": (
        appended("/** @defgroup new New\n * @{ */\nCUFLASH_API void cuflash_new(void);\n/** @} */"),
        "no doc comment"),
    "inline function": (
        appended("/** New. */\nstatic inline int32_t cuflash_new(void) { return 1; }"), "defined"),
    "variable": (appended("/** New. */\nextern int32_t cuflash_new;"), "VAR_DECL"),
    "enum without a tag": (appended("/** New. */\nenum { CUFLASH_NEW = 1 };"), "without a tag"),
    "undocumented enum": (appended("enum cuflash_new { CUFLASH_NEW = 1 };"), "no doc comment"),
    "what does not compile": (appended("int32_t cuflash_new(undeclared_t x);"), "undeclared_t"),
}


@pytest.mark.parametrize("text, message", REFUSED.values(), ids=REFUSED.keys())
def test_refused(run_on, tmp_path, text, message):
    run = run_on(text)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "bindings").exists()
