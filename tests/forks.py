"""Interpreters of their own, for what depends on which modules are loaded.

They are forks of one that has imported what takes seconds, and nothing of ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORKS = """
import json, os, sys, tempfile, traceback
for name in sys.argv[1:]:
    __import__(name)

def run(code, folder):
    os.chdir(folder)
    try:
        exec(code, {"__name__": "__main__"})
        return 0
    except SystemExit as left:
        return left.code or 0
    except BaseException:
        traceback.print_exc()
        return 1

for line in sys.stdin:
    code, folder = json.loads(line)
    assert not [name for name in sys.modules if name.startswith("mmspec")]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = run(code, folder)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        found = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        for file in (out, err):
            file.seek(0)
            found.append(file.read())
    print(json.dumps(found), flush=True)
"""


@dataclass(frozen=True)
class ProcessResult:
    """What one interpreter left."""

    status: int
    out: str
    err: str


def run_forked(codes: Sequence[str], *shared: str, folder: Path = ROOT) -> dict[str, ProcessResult]:
    """Every code in an interpreter of its own, in `folder`, that begins with `shared` modules."""
    return {code: _run_forked(code, shared, folder) for code in codes}


def _run_forked(code: str, shared: tuple[str, ...], folder: Path) -> ProcessResult:
    parent = _parent(shared)
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(json.dumps([code, str(folder)]) + "\n")
    parent.stdin.flush()
    return ProcessResult(*json.loads(parent.stdout.readline()))


@cache
def _parent(shared: tuple[str, ...]) -> subprocess.Popen[str]:
    """Ends when this process does: there is nothing more to read then."""
    command = [sys.executable, "-c", FORKS, *shared]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
