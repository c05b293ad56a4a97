#!/usr/bin/env python3
"""The fuzz target over the committed inputs, then a fixed number of runs from a fixed seed.

    run.py PROGRAM API [LIBFUZZER_OPTION ... [FOLDER]]
    run.py PROGRAM API --keep FOLDER

API, bindings/cuflash.json, names the functions that the target must call. Options replace the default ones:
`-max_total_time=600 found` searches for ten minutes and leaves the new inputs in the folder `found`; an
input that fails is left in the current folder. --keep takes from a folder of inputs those that reach new
code into corpus.txt, one in hexadecimal a line.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus.txt"
RUNS = ["-runs=30000", "-seed=1"]
# libFuzzer's own status of a failure, 77, is that of a skipped test.
LIMITS = ["-max_len=400", "-len_control=0", "-timeout=30", "-error_exitcode=1"]


def not_called(program: Path, api: Path) -> list[str]:
    listing = subprocess.run(["nm", "-D", "--undefined-only", program], check=True,
                             capture_output=True, text=True).stdout
    used = {line.split()[-1].partition("@")[0] for line in listing.splitlines()}
    functions = json.loads(api.read_text())["functions"]
    return [function["name"] for function in functions if function["name"] not in used]


def keep(program: Path, found: Path, corpus: Path, scratch: Path) -> int:
    kept = scratch / "kept"
    kept.mkdir()
    # Lines of code only: how often each ran would keep ten times as many inputs.
    status = subprocess.run([program, *LIMITS, "-merge=1", "-use_counters=0", kept, corpus,
                             found]).returncode
    if status == 0:
        inputs = sorted((file.read_bytes() for file in kept.iterdir()), key=lambda x: (len(x), x))
        CORPUS.write_text("".join(f"{data.hex()}\n" for data in inputs))
        print(f"{CORPUS}: {len(inputs)} inputs")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("api", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    arguments, options = parser.parse_known_args()
    missing = not_called(arguments.program, arguments.api)
    if missing:
        print(f"the target does not call {', '.join(missing)}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        scratch, corpus = Path(folder), Path(folder) / "corpus"
        corpus.mkdir()
        for number, line in enumerate(CORPUS.read_text().split()):
            (corpus / f"{number:04}").write_bytes(bytes.fromhex(line))
        if arguments.keep:
            return keep(arguments.program, arguments.keep, corpus, scratch)
        # New inputs go into the first folder that is named.
        for folder_name in (option for option in options if not option.startswith("-")):
            Path(folder_name).mkdir(exist_ok=True)
        command = [arguments.program, *LIMITS, *(options or [*RUNS, scratch]), corpus]
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
