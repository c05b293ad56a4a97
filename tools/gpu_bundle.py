"""Packs what a GPU machine without network needs to run the tests and the demo into one archive:

    gpu_bundle.py BUILD_FOLDER ARCHIVE

the stripped library and test programs (in the places that they have in build/release, so that they
find each other), the Python bindings and tests, the examples, gpu_check with the digests of these
sources, and the demo's model with fp16 weights for the words of its sentences. That machine needs
Python with NumPy: `./demo` there runs the demo, `tools/gpu_check --stage tests` the tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

SOURCE = Path(__file__).resolve().parents[1]
EXAMPLE = SOURCE / "examples" / "sentence_similarity"
sys.path.insert(0, str(EXAMPLE))
from minilm import installed_model  # noqa: E402

LIMIT_BYTES = 50e6
DEMO = """#!/bin/sh
# Sentence similarity on this machine's GPU.
cd "$(dirname "$0")" || exit
export CUFLASH_LIBRARY="$PWD/build/release/lib/libcuflash.so.0" PYTHONPATH="$PWD/bindings/python:$PWD/packages"
exec python3 examples/sentence_similarity --device cuda --model model "$@"
"""


def is_program(path: Path) -> bool:
    """An ELF executable or shared library, not an object file."""
    if path.is_symlink() or not path.is_file() or path.suffix == ".o":
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def copy_programs(build: Path, target: Path) -> None:
    programs = [p for folder in ("lib", "bin", "tests", "benchmarks") for p in build.glob(f"{folder}/**/*")]
    for path in filter(is_program, programs):
        copy = target / path.relative_to(build)
        copy.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["strip", "-o", copy, path], check=True)
    library = next((target / "lib").glob("libcuflash.so.*"))
    soname = ".".join(library.name.split(".")[:3])
    library.rename(library.with_name(soname))


def cut_model(model: Path, target: Path) -> None:
    """The model in fp16, its vocabulary reduced to the demo's words and renumbered."""
    sentences = (EXAMPLE / "sentences.txt").read_text().splitlines()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(sentences)]

    description = json.loads(tokenizer.to_str())
    special = [token["id"] for token in description["added_tokens"]]
    kept = sorted({*special, *(token for ids in encoded for token in ids)})
    new_id = {old: new for new, old in enumerate(kept)}
    vocabulary = description["model"]["vocab"]
    description["model"]["vocab"] = {
        word: new_id[token] for word, token in vocabulary.items() if token in new_id
    }
    for token in description["added_tokens"]:
        token["id"] = new_id[token["id"]]
    for token in description["post_processor"]["special_tokens"].values():
        token["ids"] = [new_id[old] for old in token["ids"]]

    cut = Tokenizer.from_str(json.dumps(description))
    expected = [[new_id[token] for token in ids] for ids in encoded]
    if [encoding.ids for encoding in cut.encode_batch(sentences)] != expected:
        sys.exit("the reduced vocabulary splits the demo's sentences differently")

    target.mkdir()
    cut.save(str(target / "tokenizer.json"))
    shutil.copy(model / "config.json", target)
    words = "embeddings.word_embeddings.weight"
    weights = {
        name: (tensor[kept] if name == words else tensor).astype(np.float16)
        for name, tensor in load_file(model / "model.safetensors").items()
        if tensor.dtype == np.float32 and not name.startswith("pooler.")
    }
    save_file(weights, target / "model.safetensors")


def copy_sources(target: Path) -> None:
    folders = {
        target / folder: SOURCE / folder
        for folder in ("bindings", "examples", "include", "tests/python", "tools")
    }
    for package in ("safetensors", "tokenizers"):  # their compiled parts serve any Python from 3.9
        origin = importlib.util.find_spec(package).origin
        folders[target / "packages" / package] = Path(origin).parent
    for copy, folder in folders.items():
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    digests = subprocess.run([SOURCE / "tools" / "gpu_check", "--digests"], check=True,
                             capture_output=True)
    (target / "digests.json").write_bytes(digests.stdout)
    demo = target / "demo"
    demo.write_text(DEMO)
    demo.chmod(0o755)


def main() -> None:
    build, archive = map(Path, sys.argv[1:])
    archive.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        bundle = Path(temporary) / "cuflash-gpu-bundle"
        copy_sources(bundle)
        copy_programs(build, bundle / "build" / "release")
        cut_model(installed_model(), bundle / "model")
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(bundle, bundle.name)
    size = os.path.getsize(archive)
    print(f"{archive}: {size / 1e6:.1f} MB")
    if size > LIMIT_BYTES:
        sys.exit(f"larger than {LIMIT_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
