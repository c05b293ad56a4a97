"""Adds up the results that ./dev test left in a folder: JUnit files of CTest and pytest, and the
exit statuses of single commands. Prints why tests were skipped, which failed, and the counts.

The exit status is 1 if a test failed or none ran.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def skip_reason(case: ElementTree.Element) -> str:
    """pytest puts the reason into the element; GoogleTest prints it, after "file:line: Skipped"."""
    printed = re.search(r": Skipped\n(.+?)\n", case.findtext("system-out") or "")
    if printed:
        return printed.group(1).strip()
    message = case.find("skipped").get("message") or "no reason given"
    if message == "SKIP_RETURN_CODE=77":
        lines = [line for line in (case.findtext("system-out") or "").splitlines() if line.strip()]
        message = lines[-1].strip() if lines else "exit status 77"
    return message.removeprefix("skipped: ")


def main() -> int:
    results = Path(sys.argv[1])
    passed: Counter = Counter()
    failed: list[str] = []
    skipped: Counter = Counter()
    for file in sorted(results.glob("*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{file.stem}: {case.get('name')}")
            elif case.find("skipped") is not None:
                skipped[file.stem, skip_reason(case)] += 1
            else:
                passed[file.stem] += 1
    for file in sorted(results.glob("*.status")):
        status = file.read_text().strip()
        if status == "0":
            passed["checks"] += 1
        elif status == "77":
            skipped["checks", f"{file.stem}: not installed"] += 1
        else:
            failed.append(f"checks: {file.stem}")

    for suite, count in passed.items():
        print(f"passed   {count:5}  {suite}")
    for (suite, reason), count in skipped.items():
        print(f"skipped  {count:5}  {suite}: {reason}")
    for name in failed:
        print(f"FAILED          {name}")
    print(f"{sum(passed.values())} passed, {len(failed)} failed, {sum(skipped.values())} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
