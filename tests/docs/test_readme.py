"""The README's programs, one for each language, run as they stand there, between the lines that a reader has to
supply: the arrays."""
from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bindings" / "python"), str(ROOT / "tests" / "python")]

import cargo_process  # noqa: E402
import julia_process  # noqa: E402
import numpy as np  # noqa: E402


def snippet(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} programs of {language}"
    return found[0]


def compile_and_run(compiler: list[str], source: Path, folder: Path) -> None:
    library = cargo_process.link_library(folder)
    program = folder / "program"
    subprocess.run([*compiler, "-Wall", "-Wno-misleading-indentation", "-Werror", f"-I{ROOT / 'include'}", str(source), f"-L{library}", "-lcuflash",
                    f"-Wl,-rpath,{library}", "-o", str(program)], check=True)
    subprocess.run([program], check=True)


def test_c(tmp_path):
    if not shutil.which("cc"):
        pytest.skip("no cc")
    includes, _, call = snippet("c").partition("\n")
    (tmp_path / "program.c").write_text(f"""
{includes}
#include <stdio.h>
#include <string.h>
int main(void) {{
  enum {{ batch = 2, heads = 3, length = 5, head_dim = 8, count = batch * heads * length * head_dim }};
  static unsigned short Q[count], K[count], V[count], O[count];
  static float L[batch * heads * length];
  void* stream = NULL;
  for (int i = 0; i < count; ++i) V[i] = 0x3c00;  /* 1 */
  memset(O, 0xff, sizeof O);
  cuflash_set_default_device(CUFLASH_DEVICE_CPU);
{call}
  for (int i = 0; i < count; ++i) if (O[i] != 0x3c00) return 1;  /* means of ones */
  return 0;
}}
""")
    compile_and_run(["cc", "-std=c99"], tmp_path / "program.c", tmp_path)


def test_cpp(tmp_path):
    if not shutil.which("c++"):
        pytest.skip("no c++")
    (tmp_path / "program.cpp").write_text(f"""
#include <cuflash.hpp>
#include <vector>
int main() {{
  const std::vector<float> q_(2 * 6 * 100 * 64), k_(2 * 2 * 100 * 64), v_(k_.size(), 1.0f);
  std::vector<float> o_(q_.size(), -1.0f);
  const float *q = q_.data(), *k = k_.data(), *v = v_.data();
  float* o = o_.data();
{snippet("cpp")}
  for (const float x : o_)
    if (x < 0.999f || x > 1.001f) return 1;
}}
""")
    compile_and_run(["c++", "-std=c++11"], tmp_path / "program.cpp", tmp_path)


def test_python():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, 7, 16), dtype=np.float32) for _ in range(3))
    names = {"q": q, "k": k, "v": v}
    exec(snippet("python"), names)
    scores = np.where(np.tri(7, dtype=bool), q @ k.swapaxes(2, 3) / 4, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    np.testing.assert_allclose(names["o"], weights / weights.sum(axis=3, keepdims=True) @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not cargo_process.FOUND, reason=cargo_process.MISSING)
def test_rust(tmp_path):
    """As an example of a copy of the crates: cargo knows no program of another place."""
    crates = shutil.copytree(cargo_process.CRATES, tmp_path / "crates")
    uses, _, rest = snippet("rust").partition("\n")
    (crates / "cuflash" / "examples" / "readme.rs").write_text(f"""
{uses}
fn main() -> cuflash::Result<()> {{
    let shape = [2, 3, 7, 16];
    let count = shape.iter().product();
    let (q, k, v, mut o) = (vec![1.0f32; count], vec![1.0f32; count], vec![1.0f32; count], vec![-1.0f32; count]);
{rest}
    assert!(o.iter().all(|x| (x - 1.0).abs() < 1e-3));
    Ok(())
}}
""")
    library = tmp_path / "lib"
    library.mkdir()
    cargo_process.must_pass(cargo_process.cargo(
        cargo_process.link_library(library), "run", "-p", "cuflash", "--example", "readme", crates=crates))


@pytest.mark.skipif(julia_process.JULIA is None, reason=julia_process.MISSING)
def test_julia(tmp_path):
    (tmp_path / "program.jl").write_text(f"""
q, k = randn(Float32, 16, 7, 3, 2), randn(Float32, 16, 7, 3, 2)
v = ones(Float32, 16, 7, 3, 2)
{snippet("julia")}
@assert all(x -> abs(x - 1) < 1e-3, o)
""")
    julia_process.julia(tmp_path / "program.jl")
