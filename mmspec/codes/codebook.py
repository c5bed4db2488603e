"""The codebook of an image tokenizer: token ids, code vectors, and nearest codes.

VQ codes close to each other decode to similar patches; relaxed verifiers pool the target's
probability over them (LANTERN, MuLo-SD) or group them (GSD).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmspec.errors import check_is_file, check_vocabulary

Metric = Literal["raw", "normalised"]
METRICS: tuple[Metric, ...] = ("raw", "normalised")
CHUNK = 1024  # codes per batch of distances
ADVICE = "give codebook= a Codebook, a Neighbours table, or the file of a saved table"


class CodeTokens:
    """Codes that are tokens of a vocabulary of size V: `ids` (C,) int64."""

    ids: Tensor
    vocabulary: int

    @cached_property
    def codes(self) -> Tensor:  # (V,) code of each token, -1 = none
        codes = self.ids.new_full((self.vocabulary,), -1)
        return codes.scatter(0, self.ids, torch.arange(len(self.ids), device=self.ids.device))

    def check(self, size: int) -> None:
        """Raise ValueError for distributions over another vocabulary."""
        remedy = f"build it with Codebook(vectors, ids, vocabulary={size})"
        check_vocabulary("the codebook", self.vocabulary, size, remedy)


@dataclass(frozen=True, eq=False)
class Codebook(CodeTokens):
    """C codes, their vectors, and their token ids.

    `metric` is the geometry of the decoder: "normalised" if it scales codes to length 1 (LlamaGen,
    Janus, GLM-Image), "raw" if not (Chameleon, Emu3). Tokens that are no codes have no neighbours.
    Raises ValueError if vectors and ids do not match.
    """

    vectors: Tensor = field(repr=False)  # (C, d) float
    ids: Tensor = field(repr=False)  # (C,) int64, token id of each code
    vocabulary: int  # V, token ids of the model
    metric: Metric = "raw"

    def __post_init__(self) -> None:
        if self.vectors.dim() != 2 or not self.vectors.is_floating_point():
            raise ValueError(
                f"codebook vectors are {self.vectors.dtype} {tuple(self.vectors.shape)}; give one "
                "floating point row per code, (codes, width)"
            )
        if self.metric not in METRICS:
            raise ValueError(f"metric={self.metric!r} is not known; choose 'raw' or 'normalised'")
        _check_ids(self.ids, len(self.vectors), self.vocabulary)

    @classmethod
    def from_offset(
        cls,
        vectors: Tensor,  # (C, d)
        offset: int = 0,
        vocabulary: int | None = None,
        metric: Metric = "raw",
    ) -> Codebook:
        """Codes with consecutive token ids: code c is token c + offset."""
        ids = torch.arange(len(vectors), device=vectors.device) + offset
        return cls(
            vectors, ids, offset + len(vectors) if vocabulary is None else vocabulary, metric
        )

    @property
    def size(self) -> int:
        """Number of codes."""
        return self.vectors.shape[0]

    @cached_property
    def _points(self) -> Tensor:  # (C, d) float64
        return self._to_metric_space(self.vectors)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the vectors, as float32, and of the token ids."""
        digest = hashlib.sha256(f"{tuple(self.vectors.shape)} {self.vocabulary}".encode())
        for part in (self.vectors.detach().float(), self.ids):
            digest.update(part.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]

    def distances(self, rows: Tensor) -> Tensor:  # codes (n,) -> (n, C) float64
        """Distances from some codes to all; the result does not depend on how codes are batched."""
        return torch.cdist(
            self._points[rows], self._points, compute_mode="donot_use_mm_for_euclid_dist"
        )

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:  # (...) x2 broadcast -> (...)
        """Distance between the codes of two tokens; infinite if one is no code."""
        a, b = self.codes[x], self.codes[y]
        one, other = (self._to_metric_space(self.vectors[code.clamp_min(0)]) for code in (a, b))
        return (one - other).square().sum(-1).masked_fill((a < 0) | (b < 0), torch.inf)

    def _to_metric_space(self, rows: Tensor) -> Tensor:  # (..., d) -> (..., d) float64
        """The rows in the geometry of `metric`."""
        rows = rows.detach().double()
        return torch.nn.functional.normalize(rows, dim=-1) if self.metric != "raw" else rows

    def neighbours(self, k: int, chunk: int = CHUNK) -> Neighbours:
        """The k nearest codes of every code, itself excluded; ties go to the lower code."""
        if not 1 <= k < self.size:
            raise ValueError(f"k={k}, but a code of {self.size} has 1 to {self.size - 1} others")
        near = []
        for rows in torch.arange(self.size, device=self.vectors.device).split(chunk):
            distances = self.distances(rows)
            distances.scatter_(1, rows[:, None], torch.inf)
            near.append(distances.sort(dim=-1, stable=True).indices[:, :k].int())
        return Neighbours(torch.cat(near), self.ids, self.vocabulary, self.metric, self.fingerprint)

    def nearest(self, vectors: Tensor) -> Tensor:  # (..., d) -> (...) codes
        """The code nearest to each vector; ties go to the lower code."""
        found = [
            torch.cdist(part, self._points, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)
            for part in self._to_metric_space(vectors).flatten(0, -2).split(CHUNK)
        ]
        return torch.cat(found).view(vectors.shape[:-1])

    def nearest_to_mean(self, codes: Tensor) -> Tensor:  # (..., n) -> (...) codes
        """The code nearest to the mean of n codes, in the geometry of the decoder."""
        return self.nearest(self._points[codes].mean(-2))

    def to(self, device: torch.device) -> Codebook:
        return Codebook(self.vectors.to(device), self.ids.to(device), self.vocabulary, self.metric)


@dataclass(frozen=True, eq=False)
class Neighbours(CodeTokens):
    """The nearest codes of every code, nearest first; created by `Codebook.neighbours`."""

    near: Tensor = field(repr=False)  # (C, k) int32 codes
    ids: Tensor = field(repr=False)  # (C,) int64, token id of each code
    vocabulary: int  # V
    metric: Metric
    fingerprint: str = field(repr=False)

    @property
    def k(self) -> int:
        return self.near.shape[1]

    def lookup(
        self, x: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:  # (...) -> (..., k), (..., 1) bool
        """The k nearest tokens of each token, and whether it has any."""
        code = self.codes[x]
        return self.ids[self.near[code.clamp_min(0), :k].long()], (code >= 0)[..., None]

    def check_count(self, k: int) -> None:
        """Raise ValueError for more neighbours than the table has."""
        if not 1 <= k <= self.k:
            raise ValueError(
                f"k={k}, but the table holds {self.k} neighbours; build it with "
                f"Codebook.neighbours({max(k, 1)})"
            )

    def to(self, device: torch.device) -> Neighbours:
        near, ids = self.near.to(device), self.ids.to(device)
        return Neighbours(near, ids, self.vocabulary, self.metric, self.fingerprint)

    def save(self, file: str | Path) -> None:
        """Write the table as safetensors, with the metric and the codebook's fingerprint."""
        tensors = {"near": self.near.cpu().contiguous(), "ids": self.ids.cpu().contiguous()}
        metadata = {
            "vocabulary": str(self.vocabulary),
            "metric": self.metric,
            "fingerprint": self.fingerprint,
        }
        save_file(tensors, file, metadata=metadata)

    @classmethod
    def load(cls, file: str | Path, codebook: Codebook | None = None) -> Neighbours:
        """Read a table written by `save`.

        Raises ValueError for another kind of file and, if `codebook` is given, for a table of
        another codebook or metric.
        """
        remedy = "write one with Codebook.neighbours(k).save(file)"
        try:
            check_is_file(Path(file))
            with safe_open(file, framework="pt") as source:
                metadata = source.metadata() or {}
                if not {"vocabulary", "metric", "fingerprint"} <= set(metadata):
                    raise ValueError(f"{file} is not a neighbour table; {remedy}")
                near, ids = source.get_tensor("near"), source.get_tensor("ids")
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{file} cannot be read as a neighbour table ({error}); {remedy}"
            ) from error
        metric: Metric = "normalised" if metadata["metric"] == "normalised" else "raw"
        table = cls(near, ids, int(metadata["vocabulary"]), metric, metadata["fingerprint"])
        if codebook is not None:
            _check_same(file, table, codebook)
        return table


def resolve_neighbours(
    source: Codebook | Neighbours | str | Path | None, k: int, vocabulary: int, device: torch.device
) -> Neighbours:
    """The table for an option `codebook=`: k neighbours, or all if there are fewer.

    Raises ValueError if there is none, if a saved table has too few neighbours, or if its token ids
    differ from the target's; TypeError for other objects.
    """
    if k < 1:
        raise ValueError(f"neighbours={k} leaves nothing to pool; give at least 1")
    if source is None:
        raise ValueError(f"no codebook defines which image tokens are similar; {ADVICE}")
    if isinstance(source, str | Path):
        source = Neighbours.load(source)
    if isinstance(source, Codebook):
        source = source.to(device).neighbours(min(k, source.size - 1))
    elif not isinstance(source, Neighbours):
        raise TypeError(f"codebook is a {type(source).__name__}; {ADVICE}")
    source.check(vocabulary)
    if source.k < min(k, len(source.ids) - 1):
        raise ValueError(
            f"the neighbour table holds {source.k} codes per code, but neighbours={k}; build it "
            f"with Codebook.neighbours({k}), or give neighbours={source.k}"
        )
    return source.to(device)


def resolve_codebook(given: object, use: str, vocabulary: int, device: torch.device) -> Codebook:
    """The codebook of an option `codebook=`, for methods that need the vectors.

    Raises TypeError for a table of neighbours, which has none, ValueError for other token ids.
    """
    if not isinstance(given, Codebook):
        raise TypeError(
            f"codebook is a {type(given).__name__}, but {use}; "
            "give codebook= a mmspec.codes.codebook.Codebook"
        )
    given.check(vocabulary)
    return given.to(device)


def _check_ids(ids: Tensor, size: int, vocabulary: int) -> None:
    if ids.dtype != torch.int64 or ids.shape != (size,):
        raise ValueError(
            f"ids are {ids.dtype} {tuple(ids.shape)} for {size} codes; give one int64 token id each"
        )
    if size < 2:
        raise ValueError(f"a codebook of {size} codes has no neighbours; give at least 2")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary or len(ids.unique()) < size:
        raise ValueError(
            f"ids go from {low} to {high} with {len(ids.unique())} different ones for {size} "
            f"codes; give each code its own token id below vocabulary={vocabulary}"
        )


def _check_same(file: str | Path, table: Neighbours, codebook: Codebook) -> None:
    wrong = [
        f"{name} {found} instead of {expected}"
        for name, found, expected in (
            ("fingerprint", table.fingerprint, codebook.fingerprint),
            ("metric", table.metric, codebook.metric),
        )
        if found != expected
    ]
    if wrong:
        raise ValueError(
            f"{file} belongs to another codebook ({', '.join(wrong)}); build this one's with "
            "Codebook.neighbours(k)"
        )
