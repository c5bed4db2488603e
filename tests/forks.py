"""Interpreters of their own, for what depends on which modules are loaded.

They are forks of one that has imported what takes seconds, and nothing of ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORKS = """
import json, os, sys, tempfile, traceback
shared, codes = json.load(sys.stdin)
for name in shared:
    __import__(name)
assert not [name for name in sys.modules if name.startswith("mmspec")]

def run(code):
    try:
        exec(code, {"__name__": "__main__"})
        return 0
    except SystemExit as left:
        return left.code or 0
    except BaseException:
        traceback.print_exc()
        return 1

said = []
for code in codes:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = run(code)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        found = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        for file in (out, err):
            file.seek(0)
            found.append(file.read())
    said.append(found)
json.dump(said, sys.stdout)
"""


@dataclass(frozen=True)
class Answered:
    """What one interpreter left."""

    status: int
    out: str
    err: str


def forked(codes: Sequence[str], *shared: str) -> dict[str, Answered]:
    """Every code in an interpreter of its own, which begins with the modules that are `shared`."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps([shared, codes]),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {
        code: Answered(*found) for code, found in zip(codes, json.loads(done.stdout), strict=True)
    }
