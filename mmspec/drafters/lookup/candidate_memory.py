"""The candidates of token recycling, kept between requests."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

NAME = "candidates"


class CandidateMemory:
    """A table of the next tokens that the target found likely after each token.

    It holds `width` ids per token of the vocabulary and never grows; threads may share it. It
    decides what is drafted, never what is output. Only ids are stored, but whoever can read the
    object or its file can see which tokens followed which.
    """

    def __init__(self, table: Tensor | None = None) -> None:
        self.lock = Lock()
        self._table = table

    def table(self, blank: Tensor) -> Tensor:  # (V + 1, width)
        """The table, `blank` at first. Raises ValueError for another vocabulary."""
        with self.lock:
            if self._table is None:
                self._table = blank
            if self._table.shape != blank.shape:
                raise ValueError(
                    f"the memory is of {len(self._table) - 1} tokens, but the target has "
                    f"{len(blank) - 1}; give every target a memory of its own"
                )
            self._table = self._table.to(blank.device)
            return self._table

    def clear(self) -> None:
        """Drop all candidates, also of requests that run."""
        with self.lock:
            if self._table is not None:
                self._table.fill_(-1)

    def save(self, path: str | Path) -> None:
        """Write the table as safetensors. Raises ValueError while there is none."""
        with self.lock:
            if self._table is None:
                raise ValueError("the memory is empty; save it after a request")
            save_file({NAME: self._table.cpu()}, path)

    @classmethod
    def load(cls, path: str | Path) -> CandidateMemory:
        """Read what `save` wrote. Raises ValueError for other content."""
        try:
            table = load_file(path)[NAME]
            if table.dim() != 2 or table.dtype != torch.int64 or int(table.max()) >= len(table) - 1:
                raise ValueError("ids are out of range")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ValueError(
                f"{path} is not a memory of candidates ({type(error).__name__}); give a file "
                "written by CandidateMemory.save"
            ) from None
        return cls(table)
