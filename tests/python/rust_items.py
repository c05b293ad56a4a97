"""What rustc makes of a file of Rust declarations: a program prints the types, sizes, offsets and
values of every item, so that spelling, aliases and order do not matter where two are compared.
"""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

PROGRAM = """\
#![allow(warnings)]
macro_rules! zero_by_default {{ ($name:ident) => {{}}; }}
#[path = "{path}"]
mod items;

fn name<T>() -> &'static str {{ std::any::type_name::<T>() }}
fn returned<T>(_: impl Fn() -> T) -> &'static str {{ name::<T>() }}
fn field<S, T>(_: impl Fn(&S) -> &T) -> String {{
    format!("{{}}, {{}} bytes", name::<T>(), std::mem::size_of::<T>())
}}

fn main() {{
{prints}
}}
"""


def items(file: Path, workplace: Path) -> dict[str, str]:
    """Name of each item -> what it is."""
    text = re.sub(r"//.*", "", file.read_text())
    prints = [line for find in (_functions, _structs, _constants, _aliases) for line in find(text)]
    source = workplace / f"{file.stem}_items.rs"
    program = source.with_suffix("")
    source.write_text(PROGRAM.format(path=file, prints="\n".join(prints)))
    subprocess.run(["rustc", "--edition=2021", source, "-o", program], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    # The paths of types begin with the program's and the module's names.
    lines = re.sub(rf"\b{program.name}::items::", "", output).splitlines()
    return dict(line.split(" = ", 1) for line in lines)


def bindgen(header: Path, output: Path) -> Path:
    """The header's declarations as bindgen writes them."""
    options = ["--allowlist-function=cuflash_.*", "--allowlist-type=cuflash_.*",
               "--allowlist-var=CUFLASH_.*",
               "--blocklist-type=cuflash_stream_t|CUstream_st|size_t|__.*",
               "--raw-line=pub type cuflash_stream_t = *mut ::std::os::raw::c_void;",
               "--raw-line=type size_t = usize;",  # older ones make it an unsigned long
               "--no-prepend-enum-name", "--no-doc-comments", "--no-layout-tests"]
    subprocess.run(["bindgen", header, "--output", output, *options], check=True)
    return output


def _print(name: str, form: str, *values: str) -> str:
    return f'    println!("{name} = {form}", {", ".join(values)});'


def _functions(text: str):
    for name, parameters in re.findall(r"pub fn (\w+)\s*\(([^)]*)\)", text):
        holes = ", ".join("_" for _ in re.findall(r"\w+\s*:(?!:)", parameters))
        # In a closure that nobody calls: the program links without the library.
        yield _print(name, "{}",
                     f'returned(|| items::{name} as unsafe extern "C" fn({holes}) -> _)')


def _structs(text: str):
    for name, body in re.findall(r"pub struct (\w+)\s*\{(.*?)\n\}", text, re.DOTALL):
        yield _print(name, "size {}, alignment {}", f"std::mem::size_of::<items::{name}>()",
                     f"std::mem::align_of::<items::{name}>()")
        for member in re.findall(r"pub (\w+)\s*:", body):
            yield _print(f"{name}.{member}", "{} at {}",
                         f"field(|s: &items::{name}| &s.{member})",
                         f"std::mem::offset_of!(items::{name}, {member})")


def _constants(text: str):
    for name in re.findall(r"pub const (\w+)\s*:", text):
        yield _print(name, "{}", f"items::{name} as i128")


def _aliases(text: str):
    enums = set(re.findall(r"pub const \w+\s*:\s*(\w+)", text))
    for name in re.findall(r"pub type (\w+)\s*=", text):
        # bindgen types constants unsigned where none is negative, whatever takes them.
        what = "std::mem::size_of" if name in enums else "name"
        yield _print(name, "{}", f"{what}::<items::{name}>()")
