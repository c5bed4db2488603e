"""Where the time of a round goes, without a synchronisation of its own."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


class Clock:
    """Charges time to labels: `to("draft")` ends the running label and starts another.

    On an accelerator, labels are bounded by events on the stream, read after the round's one
    transfer; the rest of the wall time is "host". On a CPU the labels are wall time themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.began = perf_counter()

    def to(self, label: str) -> None:
        """From now on time belongs to `label`."""
        self.marks.append((label, self._now()))

    def resume(self) -> None:
        """Start over: what passed since `read` belongs to the caller."""
        self.began = perf_counter()
        self.marks.clear()

    def read(self) -> dict[str, float]:
        """Seconds per label since `resume`; call it after a synchronisation."""
        wall = perf_counter() - self.began
        end = self._now()
        if self.cuda:
            end.synchronize()
        seconds: dict[str, float] = {}
        stops = [mark for _, mark in self.marks[1:]] + [end]
        for (label, start), stop in zip(self.marks, stops, strict=True):
            passed = start.elapsed_time(stop) / 1e3 if self.cuda else stop - start
            seconds[label] = seconds.get(label, 0.0) + passed
        seconds["host"] = max(wall - sum(v for k, v in seconds.items() if k != "host"), 0.0)
        return seconds

    def _now(self) -> Any:
        if not self.cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
