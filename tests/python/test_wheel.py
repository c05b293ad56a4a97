"""The source distribution and the wheel, as a user meets them: the wheel is built from the unpacked source
distribution, without CUDA, and installed from it into a fresh environment."""
from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if not (ROOT / "pyproject.toml").is_file():
    pytest.skip("no sources here", allow_module_level=True)
if importlib.util.find_spec("scikit_build_core") is None:
    pytest.skip("scikit-build-core is not installed (tests/requirements.txt)", allow_module_level=True)
if not shutil.which("cmake"):
    pytest.skip("CMake is not installed", allow_module_level=True)

VERSION = re.search(r"project\(cuflash VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
MODULES = {path.name for path in (ROOT / "bindings" / "python" / "cuflash").glob("*.py")}


def run(*command, **options) -> str:
    # Neither this tree's package nor its library may be found.
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("PYTHONPATH", "CUFLASH_LIBRARY", "VIRTUAL_ENV")}
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, env=environment,
                          **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def sdist(folder) -> Path:
    run(sys.executable, "-c", f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})",
        cwd=ROOT)
    return folder / f"cuflash-{VERSION}.tar.gz"


@pytest.fixture(scope="module")
def wheel(folder, sdist) -> Path:
    with tarfile.open(sdist) as tar:
        tar.extractall(folder / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", folder,
        "--config-settings=cmake.define.CUFLASH_CUDA=OFF", f"--config-settings=build-dir={folder / 'build'}",
        folder / "source" / f"cuflash-{VERSION}")
    wheels = list(folder.glob("*.whl"))
    assert [path.name for path in wheels] == [f"cuflash-{VERSION}-py3-none-linux_{os.uname().machine}.whl"]
    return wheels[0]


@pytest.fixture(scope="module")
def python(folder, wheel) -> Path:
    """A fresh environment with the wheel and what its extra `numpy` asks for."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", f"{wheel}[numpy]")
    return python


def test_sdist_holds_what_the_build_needs(sdist):
    with tarfile.open(sdist) as tar:
        names = [name.split("/", 1)[1] for name in tar.getnames()]
    assert {name.split("/")[0] for name in names} == {
        "CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "bindings", "cmake", "include",
        "pyproject.toml", "src"}
    assert not [name for name in names if name.endswith((".pyc", ".so", ".o"))]
    assert sdist.stat().st_size < 2e6


def test_wheel_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"cuflash-{VERSION}.dist-info/METADATA").decode()
        tags = archive.read(f"cuflash-{VERSION}.dist-info/WHEEL").decode()
    information = {f"cuflash-{VERSION}.dist-info/{name}"
                   for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    modules = {f"cuflash/{name}" for name in MODULES}
    assert names == information | modules | {"cuflash/py.typed", "cuflash/lib/libcuflash.so.0"}
    assert "Tag: py3-none-linux" in tags and "Root-Is-Purelib: false" in tags
    assert "Requires-Python: >=3.9" in metadata
    # NumPy and PyTorch only on request.
    assert all("extra ==" in line for line in metadata.splitlines() if line.startswith("Requires-Dist"))


def test_wheel_runs(folder, python):
    output = run(python, ROOT / "examples" / "python" / "arrays.py", cwd=folder)
    assert "kernel fwd_cpu" in output and "CUFLASH_ERROR_DIMENSION_MISMATCH" in output


def test_wheel_loads_its_own_library(folder, python):
    """Found inside the package, the version that the bindings are for; PyTorch is not needed."""
    output = run(python, "-c", "import cuflash; cuflash.show_versions()", cwd=folder)
    assert str(folder / "venv" / "lib") in output and "cuflash/lib/libcuflash.so.0" in output
    assert f"cuflash bindings  {VERSION}" in output and f"libcuflash        {VERSION} " in output
    output = run(python, "-c", "import cuflash\ntry:\n import cuflash.torch\n"
                 "except ModuleNotFoundError as error:\n print(error.name)", cwd=folder)
    assert output == "torch\n"
