"""Disk cache of the target's features, which training reads instead of running the target.

    cache = FeatureCache(folder, {"data": digest(data), ...}, fingerprint(reader))
    TrainingExample(inputs, tokens, cache, questions)   # read by `read_example`, row by row

A row is computed by the target once and read from disk afterwards. Shards are safetensors files of
limited size, written atomically with their owner and target, so an interrupted cache keeps its
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmspec.drafters.neural.head_prompt import TargetPrompt
from mmspec.models.compatibility import is_same_target
from mmspec.targets.readers.hooks import wanted_layers
from mmspec.training import checkpoints

if TYPE_CHECKING:  # circular import
    from mmspec.training.heads import TargetOutputs

SHARD_BYTES = 1 << 30
NAME = "features-{:05d}.safetensors"


class FeatureCache:
    """Rows of training examples by question number.

    `owner` is JSON data that they depend on besides the target. Raises ValueError at construction
    for folders with other files, damaged files, and rows of another target or owner.
    """

    def __init__(
        self,
        folder: Path,
        owner: Mapping[str, Any],
        target: list[list[float]] | None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.folder, self.owner, self.target = folder, dict(owner), target
        self.shard_bytes = shard_bytes
        self.tap: str | None = None
        self.shard_of: dict[int, Any] = {}  # question -> its open shard
        self.waiting: dict[int, dict[str, Tensor]] = {}  # not yet written
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob("features-*.part"):
            part.unlink()  # of an interrupted writer
        self.shards = sorted(folder.glob("features-*.safetensors"))
        others = sorted({*folder.iterdir()} - {*self.shards})
        if others:
            raise ValueError(
                f"{folder} holds {others[0].name}, which is not part of a feature cache; give "
                "--cache a separate folder"
            )
        for shard in self.shards:
            self._open(shard)

    def _open(self, shard: Path) -> None:
        """Open a shard. Raises ValueError for damaged files and other owners.

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
        stored = safe_open(shard, "pt")
        self.shard_of |= dict.fromkeys(content["questions"], stored)

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
        return question in self.shard_of or question in self.waiting

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
            if prompt.positions is not None:
                axes = prompt.positions.expand(*prompt.positions.shape[:-2], len(read.real), -1)
                found["positions"] = axes[..., row, cut]
            self.waiting[question] = {name: one.cpu() for name, one in found.items()}
        size_bytes = sum(one.nbytes for row in self.waiting.values() for one in row.values())
        if size_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write pending rows to a new shard. Raises OSError where the disk is full."""
        if not self.waiting:
            return
        shard = self.folder / NAME.format(len(self.shards))
        rows = self.waiting.items()
        tensors = {f"{question}.{name}": one for question, row in rows for name, one in row.items()}
        content = {"owner": self.owner, "target": self.target, "tap": self.tap}
        checkpoints.write(shard, tensors, {**content, "questions": sorted(self.waiting)})
        self.shards.append(shard)
        self._open(shard)
        self.waiting = {}

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

    def _row(self, question: int) -> dict[str, Tensor]:
        if question in self.waiting:
            return self.waiting[question]
        stored = self.shard_of[question]
        names = {name for name in stored.keys() if name.startswith(f"{question}.")}  # noqa: SIM118
        try:
            return {name.partition(".")[2]: stored.get_tensor(name) for name in names}
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
