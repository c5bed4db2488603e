"""The heaps of the C allocator; the other limits are those of `test_server` and of the edge."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mmspec.serving import limits

THREADS = """
import ctypes, runpy, sys, threading
limit = runpy.run_path(sys.argv[1])["limit_arenas"]
if sys.argv[2] == "limited":
    limit()
libc, ready = ctypes.CDLL("libc.so.6"), threading.Barrier(5)
threads = [
    threading.Thread(target=lambda: (libc.malloc(100), ready.wait())) for _ in range(4)
]
for one in threads:
    one.start()
ready.wait()
libc.malloc_stats()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_threads_share_two_heaps_of_the_c_allocator() -> None:
    def count_heaps(how: str) -> int:
        command = [sys.executable, "-c", THREADS, str(limits.__file__), how]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return found.stderr.count("Arena ")

    assert count_heaps("free") > limits.MAX_ARENAS
    assert count_heaps("limited") == limits.MAX_ARENAS
