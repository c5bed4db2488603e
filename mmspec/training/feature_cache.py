"""What a frozen target makes of its lessons, kept on disk: a head reads it instead of the target.

    cache = FeatureCache(folder, {"data": digest(data), ...}, fingerprint(reader))
    Lesson(inputs, tokens, cache, questions)       # read by `read_lesson`, row by row

A row is read by the target when it comes up first and from disk ever after. Shards are safetensors
files of a size, each there whole or not at all, that say whose they are: a cache that was cut off
by a kill goes on with the rows it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmspec.drafters.neural.head_prompt import ReadPrompt
from mmspec.models.fingerprint import agree
from mmspec.targets.readers.hooks import wanted_layers
from mmspec.training import checkpoints

if TYPE_CHECKING:  # its file needs this one
    from mmspec.training.heads import ReadLesson

SHARD_BYTES = 1 << 30
NAME = "features-{:05d}.safetensors"


class FeatureCache:
    """Rows of lessons by the number of their question.

    `owner` is what they depend on beside the target, as JSON holds it. Raises ValueError at
    construction for a folder that holds anything else, a damaged file, and rows of another target
    or owner.
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
        self.places: dict[int, Any] = {}  # question -> the opened shard it is in
        self.waiting: dict[int, dict[str, Tensor]] = {}  # read, and in no shard yet
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob("features-*.part"):
            part.unlink()  # of a writer that was killed
        self.shards = sorted(folder.glob("features-*.safetensors"))
        others = sorted({*folder.iterdir()} - {*self.shards})
        if others:
            raise ValueError(
                f"{folder} holds {others[0].name}, which is no part of a feature cache; give "
                "--cache a folder of its own"
            )
        for shard in self.shards:
            self._open(shard)

    def _open(self, shard: Path) -> None:
        """Take up a shard. Raises ValueError for one that cannot be read, or is of something else.

        Rows are looked up when they are asked for.
        """
        _, content = checkpoints.read(shard, names=())
        owner, target = content["owner"], content["target"]
        if self.target is not None and target is not None and not agree(self.target, target):
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
        self._told(content["tap"])
        opened = safe_open(shard, "pt")
        self.places |= dict.fromkeys(content["questions"], opened)

    def _told(self, tap: str) -> None:
        if self.tap not in (None, tap):
            raise ValueError(
                f"{self.folder} holds the features {self.tap!r}, and this head reads {tap!r}; give "
                "--cache another folder"
            )
        self.tap = tap

    def known(self, tap: str, question: int) -> bool:
        """Whether its features of that name need not be read by the target.

        Raises ValueError for a name of others than it holds.
        """
        self._told(tap)
        return question in self.places or question in self.waiting

    def keep(self, questions: Sequence[int], read: ReadLesson, tap: str) -> None:
        """Take up rows as the target read them, without their padding.

        Raises OSError where the disk is full; what it holds stays.
        """
        told, width = read.prompt, read.next.shape[1]
        for row, question in enumerate(questions):
            if self.known(tap, question):
                continue  # as it was read first
            size = int(read.real[row].sum())
            end = told.features.shape[1] - width + size
            cut = slice(told.padding[row], end)
            found = {"embeds": told.embeds[row, cut], "features": told.features[row, cut]}
            if wanted_layers({tap}):  # else the features are the states themselves
                found["next"] = read.next[row, :size]
            if told.positions is not None:
                axes = told.positions.expand(*told.positions.shape[:-2], len(read.real), -1)
                found["positions"] = axes[..., row, cut]
            self.waiting[question] = {name: one.cpu() for name, one in found.items()}
        held = sum(one.nbytes for row in self.waiting.values() for one in row.values())
        if held >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is in no shard yet. Raises OSError where the disk is full."""
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
    ) -> tuple[ReadPrompt, Tensor]:
        """Rows side by side, padded as a lesson of them is, and the states behind their answers.

        `ids` (B, L + T) and `real` (B, T) are the lesson's, `like` says device and dtype.
        """
        width, found = real.shape[1], [self._row(one) for one in questions]
        sizes = real.sum(-1).tolist()
        prompts = [len(row["embeds"]) - n for row, n in zip(found, sizes, strict=True)]
        length = max(prompts)
        pads = [length - one for one in prompts]

        def laid(name: str) -> Tensor:
            rows = [row[name] for row in found]
            made = like.new_zeros(len(rows), length + width, rows[0].shape[-1])
            for row, (one, pad) in enumerate(zip(rows, pads, strict=True)):
                made[row, pad : pad + len(one)] = one.to(made)
            return made

        features = laid("features")
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
        prompt = ReadPrompt(laid("embeds"), features, tuple(pads), ids, positions, {}, width)
        return prompt, after

    def _row(self, question: int) -> dict[str, Tensor]:
        if question in self.waiting:
            return self.waiting[question]
        opened = self.places[question]
        names = {name for name in opened.keys() if name.startswith(f"{question}.")}  # noqa: SIM118
        try:
            return {name.partition(".")[2]: opened.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{self.folder} is damaged ({error}); remove it to read the target again"
            ) from error


def _spread(positions: Tensor, pad: int, length: int) -> Tensor:  # (..., n) -> (..., length)
    """Positions of a row between its padding and the filling behind it, which counts on."""
    behind = length - pad - positions.shape[-1]
    steps = torch.arange(1, behind + 1)
    front = positions.new_zeros(*positions.shape[:-1], pad)
    return torch.cat((front, positions, positions[..., -1:] + steps), -1)
