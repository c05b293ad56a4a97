"""The site builds without a warning, and nothing of the header is missing in it.

Skipped where doxygen or Sphinx is not installed.
"""
from __future__ import annotations

import importlib.util
import json
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
API = json.loads((ROOT / "bindings" / "cuflash.json").read_text())
# What the pages include beside docs/ itself.
SOURCES = ["docs", "include", "examples", "bindings/rust/cuflash/examples", "bindings/rust/cuflash/README.md",
           "bindings/julia/CUFlash.jl/examples", "CHANGELOG.md", "CONTRIBUTING.md"]

if not shutil.which("doxygen"):
    pytest.skip("doxygen is not installed", allow_module_level=True)
if importlib.util.find_spec("breathe") is None:
    pytest.skip("Sphinx is not installed (tools/requirements/docs.txt)", allow_module_level=True)


def build(root: Path, output: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html",
               "-d", output / "intermediate", root / "docs", output / "html"]
    return subprocess.run(command, text=True, capture_output=True, timeout=300)


def inventory(output: Path) -> dict[str, set[str]]:
    """What the site documents, by kind ("c:function"), without the names of enclosing things."""
    from sphinx.util.inventory import InventoryFile

    with (output / "html" / "objects.inv").open("rb") as file:
        entries = InventoryFile.load(file, "", posixpath.join)
    return {kind: set(names) for kind, names in entries.items()}


def missing(documented: dict[str, set[str]], api: dict) -> list[str]:
    """Names of the header that the site does not document."""
    wanted = {
        "c:function": {function["name"] for function in api["functions"]},
        "c:struct": {struct["name"] for struct in api["structs"]},
        "c:member": {f"{struct['name']}.{field['name']}"
                     for struct in api["structs"] for field in struct["fields"]},
        "c:enum": {enum["tag"] for enum in api["enums"]},
        "c:enumerator": {value["name"] for enum in api["enums"] for value in enum["values"]},
        "c:type": {typedef["name"] for typedef in api["typedefs"]},
        "c:macro": set(api["macros"]),
    }
    return sorted(name for kind, names in wanted.items() for name in names - documented.get(kind, set()))


def copy(target: Path) -> Path:
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("site")
    run = build(ROOT, output)
    assert run.returncode == 0, run.stdout + run.stderr
    return output


def test_everything_of_the_header_is_documented(site):
    assert missing(inventory(site), API) == []


def test_pages_are_there(site):
    pages = {path.stem for path in (site / "html").glob("*.html")}
    assert {"install", "quick_start", "conventions", "errors", "python", "cpp", "rust", "julia", "reference",
            "glossary", "demo"} <= pages
    logs = {path.stem for path in (ROOT / "docs" / "log").glob("*.md")}
    assert logs == {path.stem for path in (site / "html" / "log").glob("*.html")}


def test_every_picture_is_shown(site):
    shown = {path.name for path in (site / "html" / "_images").iterdir()}
    assert {path.name for path in (ROOT / "docs" / "pictures").glob("*.svg")} <= shown


def test_pages_load_nothing_from_elsewhere(site):
    for page in (site / "html").rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?:[^"]*)"',
                            page.read_text())
        assert loaded == [], page.name


def test_every_status_is_explained():
    statuses = next(enum for enum in API["enums"] if enum["tag"] == "cuflash_status")["values"]
    text = (ROOT / "docs" / "errors.md").read_text()
    explained = re.findall(r"^(\d+) `(\w+)`\n: ", text, re.MULTILINE)
    assert explained == [(str(status["value"]), status["name"]) for status in statuses]


# ---- these checks can fail ---------------------------------------------------------------------------


def test_missing_names_are_found(site):
    more = json.loads(json.dumps(API))
    more["functions"].append(dict(more["functions"][0], name="cuflash_undocumented"))
    more["structs"][0]["fields"].append({"name": "undocumented"})
    more["enums"][0]["values"].append({"name": "CUFLASH_UNDOCUMENTED"})
    struct = more["structs"][0]["name"]
    assert missing(inventory(site), more) == sorted(
        ["CUFLASH_UNDOCUMENTED", "cuflash_undocumented", f"{struct}.undocumented"])


def test_undocumented_declarations_are_refused(tmp_path):
    header = copy(tmp_path) / "include" / "cuflash.h"
    text = header.read_text()
    anchor = "CUFLASH_API int32_t cuflash_kernel_count(void);"
    assert text.count(anchor) == 1
    header.write_text(text.replace(anchor, f"{anchor}\n\nCUFLASH_API void cuflash_new(void);"))
    run = build(tmp_path, tmp_path / "output")
    assert run.returncode != 0 and "cuflash_new" in run.stderr


def test_broken_references_and_lost_groups_are_found(tmp_path):
    docs = copy(tmp_path) / "docs"
    reference = (docs / "reference.md").read_text()
    assert "{doxygengroup} workspace\n:content-only:" in reference
    (docs / "reference.md").write_text(reference.replace(
        "{doxygengroup} workspace\n:content-only:", "{doxygengroup} workspace\n:desc-only:"))
    (docs / "install.md").write_text("# Install\n\n[nowhere](nowhere.md)\n")
    (docs / "cpp.md").write_text("# C++\n\n```{doxygenclass} cuflash::Gone\n```\n")
    run = build(tmp_path, tmp_path / "output")
    assert run.returncode != 0
    assert "nowhere" in run.stderr and "cuflash::Gone" in run.stderr
    assert "cuflash_workspace_prepare" in missing(inventory(tmp_path / "output"), API)
