"""Disk cache of the target's features, which training reads instead of running the target.

    cache = FeatureCache(folder, {"data": digest(data), ...}, fingerprint(reader))
    TrainingExample(inputs, tokens, cache, questions)   # read by `read_example`, row by row

A row is computed by the target once and read from disk afterwards. Shards are safetensors files of
limited size, written atomically with their owner and target, so an interrupted cache keeps its
rows. Several processes write shards of their own: `fill` computes a share of the rows in each.
Memory holds the rows of one unwritten shard, and where each row is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.drafters.neural.head_prompt import TargetPrompt
from mmspec.models.compatibility import is_same_target
from mmspec.targets.readers.hooks import wanted_layers
from mmspec.training import checkpoints
from mmspec.training.fitting import TrainingProgress, silent
from mmspec.training.processes import Processes

if TYPE_CHECKING:  # circular import
    from mmspec.training.heads import TargetOutputs

SHARD_BYTES = 1 << 30
MAX_MAPPED = 64  # shards that are mapped into memory at once


@dataclass(frozen=True)
class _Place:
    """A shard, and the tensors of some rows in it."""

    shard: Path
    names: tuple[str, ...]


class FeatureCache:
    """Rows of training examples by question number.

    `owner` is JSON data that they depend on besides the target. Raises ValueError at construction
    for folders with other files, damaged files, and rows of another target or owner. `process` is
    the number of the writer; None = nothing is written.
    """

    def __init__(
        self,
        folder: Path,
        owner: Mapping[str, Any],
        target: list[list[float]] | None,
        shard_bytes: int = SHARD_BYTES,
        process: int | None = 0,
    ) -> None:
        self.folder, self.owner, self.target = folder, dict(owner), target
        self.shard_bytes, self.process = shard_bytes, process
        self.tap: str | None = None
        self.shards: list[Path] = []
        self.places: dict[int, _Place] = {}  # by question
        self.mapped: dict[Path, Any] = {}  # recently used shards, the last one last
        self.waiting: dict[int, dict[str, Tensor]] = {}  # not yet written
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob("features-*.part"):
            part.unlink()  # of an interrupted writer
        others = sorted({*folder.iterdir()} - {*folder.glob("features-*.safetensors")})
        if others:
            raise ValueError(
                f"{folder} holds {others[0].name}, which is not part of a feature cache; give "
                "--cache a separate folder"
            )
        self.refresh()

    def refresh(self) -> None:
        """Add the shards of other processes. Raises ValueError as at construction."""
        for shard in sorted({*self.folder.glob("features-*.safetensors")} - {*self.shards}):
            self._open(shard)

    def _open(self, shard: Path) -> None:
        """Find the rows of a shard. Raises ValueError for damaged files and other owners.

        Rows are read on demand.
        """
        _, content = checkpoints.read(shard, names=())
        owner, target = content["owner"], content["target"]
        if (
            self.target is not None
            and target is not None
            and not is_same_target(self.target, target)
        ):
            raise ValueError(
                f"{shard} holds the states of another target; give --cache another folder, or "
                "remove this one"
            )
        other = [name for name in owner | self.owner if owner.get(name) != self.owner.get(name)]
        if other:
            raise ValueError(
                f"{shard} was made with other {other[0]}; give --cache another folder, or remove "
                "this one"
            )
        self._set_tap(content["tap"])
        names: dict[int, tuple[str, ...]] = {}
        for key in sorted(self._map(shard).keys()):
            question, _, name = key.partition(".")
            names[int(question)] = (*names.get(int(question), ()), name)
        shared = {found: _Place(shard, found) for found in set(names.values())}
        self.places |= {one: shared[names[one]] for one in content["questions"]}
        self.shards.append(shard)

    def _map(self, shard: Path) -> Any:
        """The opened shard; those used long ago are closed."""
        found = self.mapped.pop(shard, None)
        self.mapped[shard] = safe_open(shard, "pt") if found is None else found
        if len(self.mapped) > MAX_MAPPED:
            del self.mapped[next(iter(self.mapped))]
        return self.mapped[shard]

    def _set_tap(self, tap: str) -> None:
        if self.tap not in (None, tap):
            raise ValueError(
                f"{self.folder} holds the features {self.tap!r}, and this head reads {tap!r}; give "
                "--cache another folder"
            )
        self.tap = tap

    def contains(self, tap: str, question: int) -> bool:
        """Whether the features of a question are cached.

        Raises ValueError for another name of features than the cache holds.
        """
        self._set_tap(tap)
        return question in self.places or question in self.waiting

    def add(self, questions: Sequence[int], read: TargetOutputs, tap: str) -> None:
        """Add the target's outputs of rows, without padding.

        Raises OSError where the disk is full; written rows stay.
        """
        prompt, width = read.prompt, read.next.shape[1]
        for row, question in enumerate(questions):
            if self.contains(tap, question):
                continue  # already cached
            size = int(read.real[row].sum())
            end = prompt.features.shape[1] - width + size
            cut = slice(prompt.padding[row], end)
            found = {"embeds": prompt.embeds[row, cut], "features": prompt.features[row, cut]}
            if wanted_layers({tap}):  # else the features are the states themselves
                found["next"] = read.next[row, :size]
            if prompt.tokens is not None:
                found["ids"] = prompt.tokens[row, prompt.padding[row] : -width].int()
            if prompt.positions is not None:
                axes = prompt.positions.expand(*prompt.positions.shape[:-2], len(read.real), -1)
                found["positions"] = axes[..., row, cut]
            self.waiting[question] = {
                name: one.contiguous().to("cpu", copy=True) for name, one in found.items()
            }
        size_bytes = sum(one.nbytes for row in self.waiting.values() for one in row.values())
        if size_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write pending rows to a new shard. Raises OSError where the disk is full."""
        if not self.waiting:
            return
        if self.process is None:
            self.waiting = {}
            return
        own = [int(one.stem.split("-")[-1]) for one in self.shards if one.match(self._name("*"))]
        shard = self.folder / self._name(f"{max(own, default=-1) + 1:05d}")
        rows = self.waiting.items()
        tensors = {f"{question}.{name}": one for question, row in rows for name, one in row.items()}
        content = {"owner": self.owner, "target": self.target, "tap": self.tap}
        checkpoints.write(shard, tensors, {**content, "questions": sorted(self.waiting)})
        self._open(shard)
        self.waiting = {}

    def _name(self, number: str) -> str:
        return f"features-{self.process:05d}-{number}.safetensors"

    def fill(
        self,
        batches: Sequence[Sequence[int]],
        read: Callable[[int], None],
        tap: str,
        processes: Processes,
        progress: TrainingProgress = silent,
    ) -> None:
        """Add the rows of batches of questions; `read` adds those of a batch by its index.

        Processes share the batches, and return when all rows can be read. Raises OSError where the
        disk is full; written rows stay.
        """
        missing = [
            number
            for number, batch in enumerate(batches)
            if not all(self.contains(tap, one) for one in batch)
        ]
        own = processes.share(missing)
        processes.wait()  # all have looked before the first shard is written
        for count, number in enumerate(own, 1):
            read(number)
            progress("features", count, len(own), float("nan"))
        self.flush()
        processes.wait()
        self.refresh()
        if not all(self.contains(tap, one) for batch in batches for one in batch):
            raise ValueError(
                f"{self.folder} lacks rows that other processes have written; give --cache a "
                "folder that all processes share"
            )

    def rows(
        self, questions: Sequence[int], ids: Tensor | None, real: Tensor, like: Tensor
    ) -> tuple[TargetPrompt, Tensor]:
        """Return rows as a padded batch, and the states of their response tokens.

        `ids` (B, L + T) and `real` (B, T) are the example's; `like` gives device and dtype.
        """
        width, found = real.shape[1], [self._row(one) for one in questions]
        sizes = real.sum(-1).tolist()
        prompts = [len(row["embeds"]) - n for row, n in zip(found, sizes, strict=True)]
        length = max(prompts)
        pads = [length - one for one in prompts]

        def pad_rows(name: str) -> Tensor:
            rows = [row[name] for row in found]
            batch = like.new_zeros(len(rows), length + width, rows[0].shape[-1])
            for row, (one, pad) in enumerate(zip(rows, pads, strict=True)):
                batch[row, pad : pad + len(one)] = one.to(batch)
            return batch

        features = pad_rows("features")
        after = features[:, length:]
        if "next" in found[0]:
            after = like.new_zeros(len(found), width, found[0]["next"].shape[-1])
            for row, own in enumerate(found):
                after[row, : sizes[row]] = own["next"].to(after)
        positions = None
        if "positions" in found[0]:
            rows = [
                _spread(one["positions"], pad, length + width)
                for one, pad in zip(found, pads, strict=True)
            ]
            positions = torch.stack(rows, -2).to(like.device)
        prompt = TargetPrompt(pad_rows("embeds"), features, tuple(pads), ids, positions, {}, width)
        return prompt, after

    def prompt_ids(self, questions: Sequence[int]) -> Tensor | None:  # (B, L) int64
        """Prompts of written rows, padded with 0 on the left; None if one of them is not there."""
        places = [self.places.get(one) for one in questions]
        if not all(one is not None and "ids" in one.names for one in places):
            return None
        rows = [self._row(one, ("ids",))["ids"].long().flip(0) for one in questions]
        return pad_sequence(rows, batch_first=True).flip(1)

    def _row(self, question: int, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        if question in self.waiting:
            return self.waiting[question]
        place = self.places[question]
        try:
            stored, names = self._map(place.shard), place.names if names is None else names
            return {name: stored.get_tensor(f"{question}.{name}") for name in names}
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{self.folder} is damaged ({error}); remove it to rebuild it"
            ) from error


def _spread(positions: Tensor, pad: int, length: int) -> Tensor:  # (..., n) -> (..., length)
    """Pad the positions of a row with zeros before it, and consecutive ones after it."""
    after = length - pad - positions.shape[-1]
    steps = torch.arange(1, after + 1)
    front = positions.new_zeros(*positions.shape[:-1], pad)
    return torch.cat((front, positions, positions[..., -1:] + steps), -1)
