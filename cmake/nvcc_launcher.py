#!/usr/bin/env python3
"""Runs one compiler command and keeps what ptxas says about its kernels beside the object file.

Registers, spills, shared memory and the compiler's CPU time go to <object>.ptxas for
tests/budgets/check.py; the terminal sees the rest (warnings and errors).
"""
import re
import resource
import subprocess
import sys

PTXAS_INFO = re.compile(r"^\s*(ptxas info\s*:|\d+ bytes stack frame|Function properties|$)")


def main() -> int:
    command = sys.argv[1:]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = done.stderr.splitlines(keepends=True)
    sys.stderr.writelines(line for line in lines if not PTXAS_INFO.match(line))
    if "-o" in command and done.returncode == 0:
        with open(command[command.index("-o") + 1] + ".ptxas", "w") as file:
            file.write(f"cpu seconds: {used.ru_utime + used.ru_stime:.1f}\n")
            file.writelines(line for line in lines if PTXAS_INFO.match(line))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
