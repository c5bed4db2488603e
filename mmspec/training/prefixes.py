"""Read what the turns of a conversation share once, and go on from the target's cache.

    prompt of turn 3    s s q q a a q a q     read once
    prompt of turn 1    s s q q               its first tokens are those of turn 3: kept but for
    prompt of turn 2    s s q q a a q         the last ones, which are read after them

Hidden states and keys of a token depend on the tokens before it alone, so they are those of each
prompt read anew, up to rounding. That is compared once per target. A turn whose tokens are not the
first ones of a later turn, as where a chat template drops the thinking of earlier answers, is read
anew and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmspec import _hf
from mmspec.drafters.neural.head_prompt import TargetPrompt
from mmspec.targets.memory import Memory
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.hooks import HiddenStateHook, LayerStatesHook, wanted_layers
from mmspec.targets.readers.rounding import rounding_margin, score_difference
from mmspec.targets.slots import SlotLayer
from mmspec.targets.tokens.turns import EarlierTurns
from mmspec.training.conversations import Question
from mmspec.training.heads import TargetOutputs, TrainingExample, read_by_target

MAX_TAIL = 16  # tokens at the end of a prompt that may differ: those that ask for an answer
_GRIDS = ("_grid_thw", "per_grid_ts")  # sizes of images, which M-RoPE reads beside the ids


@dataclass
class PrefixCounts:
    """Tokens of prompts of conversations, and turns that share nothing."""

    read: int = 0
    unshared: int = 0  # that would be read turn by turn
    reused: int = 0  # turns
    anew: int = 0

    def __add__(self, other: PrefixCounts) -> PrefixCounts:
        return PrefixCounts(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, int, int, int]:
        return self.read, self.unshared, self.reused, self.anew


def report_prefixes(counts: Sequence[PrefixCounts]) -> dict[str, Any]:
    """What all processes have read, for a report; empty without conversations."""
    total = sum(counts, PrefixCounts())
    if not total.reused + total.anew:
        return {}
    read = [total.read, total.unshared]
    return {"tokens of conversations read, and turn by turn": read, "turns read anew": total.anew}


@dataclass(frozen=True)
class SharedPrefix:
    """Rows of a batch whose first W tokens were read; padded on the left."""

    rows: list[int]  # of the batch
    inputs: dict[str, Tensor]  # of these rows, whole, without images
    past: EarlierTurns
    read: TargetPrompt  # of the first W tokens; its `features` are of the requested name

    @property
    def tail(self) -> int:
        """Tokens of a row that are read after its first ones."""
        return self.inputs["input_ids"].shape[1] - self.past.length

    def prepend_to(self, prompt: TargetPrompt) -> TargetPrompt:
        """The whole prompt, of which `prompt` holds the tokens after the first W."""
        positions = prompt.positions
        if positions is not None and self.read.positions is not None:
            shape = (*self.read.positions.shape[:-1], -1)
            positions = torch.cat((self.read.positions, positions.expand(shape)), -1)
        return replace(
            prompt,
            embeds=torch.cat((self.read.embeds, prompt.embeds), 1),
            features=torch.cat((self.read.features, prompt.features), 1),
            positions=positions,
        )


@dataclass(frozen=True)
class _Branch:
    """A row of a batch, and the row of the conversation's last prompt that it begins as."""

    row: int
    last: int
    shared: int  # tokens in common
    length: int


@dataclass(frozen=True)
class _LastTurns:
    """The last prompts of C conversations, as they were read."""

    rows: list[int]  # of the batch
    memory: Memory
    states: HiddenStateHook
    features: Tensor  # (C, L, k * D)

    def slots(
        self, found: Sequence[_Branch], length: int, count: int
    ) -> tuple[Tensor, Tensor]:  # (R,), (R, count)
        """Conversation, and slots of the first `count` ones, of prompts padded to `length`."""
        at = [self.rows.index(one.last) for one in found]
        shift = [
            self.memory.padding[own] - (length - one.length)
            for own, one in zip(at, found, strict=True)
        ]
        device = self.features.device
        place = torch.arange(count, device=device) + torch.tensor(shift, device=device)[:, None]
        return torch.tensor(at, device=device), place.clamp(0, self.features.shape[1] - 1)

    def gather(self, at: Tensor, slots: Tensor) -> TargetPrompt:  # (R,), (R, n)
        """What was recorded there; `padding` is empty."""
        positions, rows = self.states.positions, at[:, None]
        if positions is not None:
            positions = positions.expand(*positions.shape[:-2], len(self.features), -1)
            positions = positions[..., rows, slots]
        embeds = self.states.embeds[rows, slots]
        return TargetPrompt(embeds, self.features[rows, slots], (), positions=positions)


class PrefixReader:
    """Reads the prompts of turns for a target; each conversation's once.

    `teacher` is a `mmspec.modality.Teacher`.
    """

    def __init__(self, teacher: Any) -> None:
        self.teacher, self.reader = teacher, teacher.reader
        self.counts = PrefixCounts()
        self.is_shareable: bool | None = None  # None = not compared yet
        if not (isinstance(self.reader, Backbone) and not self.reader.stepwise):
            self.is_shareable = False

    def share(
        self, questions: Sequence[Question], media: Sequence[Any], inputs: Mapping[str, Tensor]
    ) -> SharedPrefix | None:
        """Read the prompts of a batch that share their first tokens; None if none do.

        `inputs` are the batch's, with media of the same kinds.
        """
        tokens = _unpadded(inputs)
        found = self._plan(questions, tokens)
        last = self._read_last(questions, media, found, None)
        if last is None:
            return None
        self._count(tokens, last, [one.length for one in found])
        shared = self._continue(questions, media, found, last)
        self.counts.read += len(found) * shared.tail
        return shared

    def read(
        self,
        questions: Sequence[Question],
        media: Sequence[Any],
        responses: Sequence[Sequence[int]],
        tap: str,
    ) -> Iterator[tuple[list[int], TargetOutputs]]:
        """The target's outputs of prompts and responses, with the rows of the batch they are of.

        A response that a later prompt of the conversation contains is not read again.
        """
        inputs = self._inputs(questions, media, range(len(questions)))
        tokens, rest = _unpadded(inputs), list(range(len(questions)))
        found = self._plan(questions, tokens)
        last = self._read_last(questions, media, found, tap)
        if last is not None:
            self._count(tokens, last, [one.length + len(responses[one.row]) for one in found])
            rest = [at for at in rest if at not in {one.row for one in found}]
            told = [one for one in found if _is_told(one, tokens, responses)]
            left = [one for one in found if one not in told]
            if told:
                yield [one.row for one in told], _outputs(told, tokens, responses, last)
            if left:
                shared = self._continue(questions, media, left, last)
                self.counts.read += len(left) * shared.tail
                self.counts.read += sum(len(responses[row]) for row in shared.rows)
                example = _example(shared.inputs, [responses[row] for row in shared.rows])
                yield shared.rows, read_by_target(self.reader, example, tap, prefix=shared)
        if rest:
            given = inputs if last is None else self._inputs(questions, media, rest)
            example = _example(given, [responses[at] for at in rest])
            yield rest, read_by_target(self.reader, example, tap)

    @torch.no_grad()
    def _read_last(
        self,
        questions: Sequence[Question],
        media: Sequence[Any],
        found: Sequence[_Branch],
        tap: str | None,
    ) -> _LastTurns | None:
        """Read the last prompts; None if there are none, or if turns cannot go on from them."""
        if not found:
            return None
        rows = sorted({one.last for one in found})
        layers = wanted_layers({tap}).get(tap, ()) if tap else ()
        with HiddenStateHook(self.reader) as states, LayerStatesHook(self.reader, layers) as hook:
            memory, _, _ = self.reader.prefill(self._inputs(questions, media, rows), extra_slots=0)
        if not _is_plain(memory):
            self.is_shareable = False
            return None
        last = _LastTurns(rows, memory, states, hook.offer() if layers else states.hidden)
        if self.is_shareable is None:
            shared = self._continue(questions, media, found, last)
            self.is_shareable = self._agrees(questions, media, shared)
        return last if self.is_shareable else None

    @torch.no_grad()
    def _continue(
        self,
        questions: Sequence[Question],
        media: Sequence[Any],
        found: Sequence[_Branch],
        last: _LastTurns,
    ) -> SharedPrefix:
        """The rows, with the cache of their first tokens."""
        rows = [one.row for one in found]
        kept = _without_media(self._inputs(questions, media, rows))
        if self.reader.family.rope_axes > 1 and not any(name.endswith(_GRIDS) for name in kept):
            kept["position_ids"] = _hf.make_prompt_positions(self.reader.model, kept)
        length = kept["input_ids"].shape[1]
        cached = length - max(one.length - one.shared for one in found)
        at, slots = last.slots(found, length, cached)
        past = EarlierTurns(_branch(self.reader, last.memory, at, slots), cached, True)
        return SharedPrefix(rows, kept, past, last.gather(at, slots))

    def _count(self, tokens: Sequence[list[int]], last: _LastTurns, sizes: Sequence[int]) -> None:
        self.counts.read += sum(len(tokens[one]) for one in last.rows)
        self.counts.unshared += sum(sizes)
        self.counts.reused += len(sizes)

    def _plan(self, questions: Sequence[Question], tokens: Sequence[list[int]]) -> list[_Branch]:
        """The rows that begin as the last turn of their conversation, with that turn itself."""
        if self.is_shareable is False:
            return []
        turns: dict[int, list[int]] = {}
        for at, one in enumerate(questions):
            turns.setdefault(one.row, []).append(at)
        found = []
        for rows in turns.values():
            last = max(rows, key=lambda at: len(questions[at].turns))
            own = [_compare(tokens, row, last) for row in rows]
            near = [one for one in own if one.length - one.shared <= MAX_TAIL]
            self.counts.anew += len(own) - len(near)
            found += near
        tail = max((one.length - one.shared for one in found), default=0)
        visual = set(self.reader.visual_ids)
        usable = [
            one for one in found if one.length > tail and visual.isdisjoint(tokens[one.row][-tail:])
        ]
        self.counts.anew += len(found) - len(usable)
        shared = [one.last for one in usable]
        alone = [one for one in usable if shared.count(one.last) == 1]
        return [one for one in usable if one not in alone]

    def _inputs(
        self, questions: Sequence[Question], media: Sequence[Any], rows: Sequence[int]
    ) -> dict[str, Tensor]:
        opened = [media[at] for at in rows]
        found: dict[str, Tensor] = self.teacher.inputs([questions[at] for at in rows], opened)
        return found

    def _agrees(
        self, questions: Sequence[Question], media: Sequence[Any], shared: SharedPrefix
    ) -> bool:
        """Whether a turn continued is scored as one that is read anew.

        Not so where tokens attend to later ones, as in a prefix language model.
        """
        room = len(shared.rows)
        _, logits, _ = self.reader.prefill(shared.inputs, extra_slots=room, past=shared.past)
        _, expected, _ = self.reader.prefill(
            self._inputs(questions, media, shared.rows), extra_slots=room
        )
        apart = float(score_difference(logits, expected))
        return apart <= rounding_margin(self.reader.model.dtype)


def _unpadded(inputs: Mapping[str, Tensor]) -> list[list[int]]:
    pairs = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True)
    return [[one for one, seen in zip(*pair, strict=True) if seen] for pair in pairs]


def _compare(tokens: Sequence[list[int]], row: int, last: int) -> _Branch:
    """How many tokens of a row are those of the last turn; its own last one is always read."""
    pairs = enumerate(zip(tokens[row], tokens[last], strict=False))
    same = next((at for at, (a, b) in pairs if a != b), len(tokens[row]))
    return _Branch(row, last, min(same, len(tokens[row]) - 1), len(tokens[row]))


def _without_media(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ids, masks and types of tokens, and the grids of images."""
    shape = inputs["input_ids"].shape
    return {
        name: value
        for name, value in inputs.items()
        if value.shape == shape or name.endswith(_GRIDS)
    }


def _is_plain(memory: Any) -> bool:
    """Whether a memory holds keys and values of attention alone, and any row can be cut."""
    return (
        isinstance(memory, Memory)
        and memory.source is None
        and not memory.step_inputs
        and all(
            type(one) is SlotLayer and not one.is_cross_attention for one in memory.cache.layers
        )
    )


def _branch(reader: Backbone, memory: Memory, rows: Tensor, slots: Tensor) -> DynamicCache:
    """A cache of keys and values at `slots` (R, W) of some rows (R,)."""
    cache = DynamicCache(config=reader.cache_config)
    for index, layer in enumerate(memory.cache.layers):
        at, where = rows.to(layer.keys.device)[:, None], slots.to(layer.keys.device)
        keys, values = (one[at, :, where].transpose(1, 2) for one in (layer.keys, layer.values))
        cache.update(keys.contiguous(), values.contiguous(), index)
    return cache


def _is_told(one: _Branch, tokens: Sequence[list[int]], responses: Sequence[Sequence[int]]) -> bool:
    """Whether the last prompt of the conversation contains a turn with its response."""
    whole = [*tokens[one.row], *responses[one.row]]
    return tokens[one.last][: len(whole)] == whole


def _outputs(
    told: Sequence[_Branch],
    tokens: Sequence[list[int]],
    responses: Sequence[Sequence[int]],
    last: _LastTurns,
) -> TargetOutputs:
    """The target's outputs of turns that the last prompts contain."""
    length, device = max(one.length for one in told), last.features.device
    rows = [responses[one.row] for one in told]
    width = max(map(len, rows))
    at, slots = last.slots(told, length, length + width)
    pads = tuple(length - one.length for one in told)
    ids = [
        [*[0] * pad, *tokens[one.row], *own, *[0] * (width - len(own))]
        for one, own, pad in zip(told, rows, pads, strict=True)
    ]
    prompt = replace(
        last.gather(at, slots),
        padding=pads,
        tokens=torch.tensor(ids, device=device),
        response_length=width,
    )
    after = last.states.hidden[at[:, None], slots[:, length:]]
    sizes = torch.tensor([[len(own)] for own in rows], device=device)
    return TargetOutputs(prompt, after, torch.arange(width, device=device) < sizes)


def _example(inputs: Mapping[str, Tensor], responses: Sequence[Sequence[int]]) -> TrainingExample:
    width, device = max(map(len, responses)), inputs["input_ids"].device
    rows = [[*one, *[-1] * (width - len(one))] for one in responses]
    return TrainingExample(inputs, torch.tensor(rows, device=device))
