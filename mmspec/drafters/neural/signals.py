"""What a compressor is told beside the features of a picture: attention, states, the question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.codes.episodes import EarlierLooks, Episode, episodes_of
from mmspec.compressors.contract import OF_ROBOTS, Features, pictures
from mmspec.targets.tokens.context import Context

OF_TARGET = frozenset(  # by slot of the target's prompt
    {
        *("attention", "question-attention", "last-layer-attention"),
        *("states", "question-states"),
    }
)


@dataclass(frozen=True)
class Seen:
    """The prompt that the features of a request lie over, and what their own model says of it."""

    rows: Sequence[Sequence[int]]  # token ids, without padding
    visual: frozenset[int]  # ids that are no text
    embed: Callable[[Tensor], Tensor]  # (1, T) ids -> (1, T, H) beside which the features are read
    cls: Sequence[Tensor] = ()  # per picture (n,)
    placeholder: int = -1  # of the pictures that `cls` speaks of


def wanted(needs: frozenset[str]) -> frozenset[str]:
    """What the target must offer so that the signals `needs` can be given."""
    offered = needs & OF_TARGET - {"question-states"}
    return offered | ({"states"} if "question-states" in needs else frozenset())


def signals(
    needs: frozenset[str], context: Context, seen: Seen
) -> Callable[[int, Features], Mapping[str, Tensor]]:
    """The signals of any picture of any row.

    Raises ValueError where the target, whose attention or states are needed, has read another
    prompt than the one that the features lie over.
    """
    if needs & OF_TARGET:
        _check_same(needs, context, seen)
    told = {name: _per_row(name, context, seen) for name in needs}

    def of(row: int, picture: Features) -> Mapping[str, Tensor]:
        return {name: _at(name, rows[row], picture.positions) for name, rows in told.items()}

    return of


def _at(name: str, value: Tensor, slots: Tensor) -> Tensor:
    """A row's signal, of a picture at these slots where it goes by slot."""
    if name in ("text", "question-states", "precision"):
        return value
    return value[:, slots] if name == "states" else value[slots]


def _check_same(needs: frozenset[str], context: Context, seen: Seen) -> None:
    prompts = zip(context.history, context.prompt, strict=True)
    if [row[:length] for row, length in prompts] != [list(row) for row in seen.rows]:
        raise ValueError(
            f"the compressor needs {', '.join(sorted(needs & OF_TARGET))} of the target, but the "
            "draft model got another prompt (drafter_inputs=), whose slots are not the target's; "
            "give both the same, or choose a compressor that needs nothing of the target"
        )


def _per_row(name: str, context: Context, seen: Seen) -> list[Tensor]:
    """One signal for every row: by slot, or for the question."""
    if name == "cls":
        return _laid(seen)
    if name in OF_ROBOTS:
        rows = zip(episodes_of(context), seen.rows, strict=True)
        return [_remembered(name, episode, len(row), seen) for episode, row in rows]
    if name == "text":
        return [seen.embed(_tensor(row, context)[None, at])[0] for row, at in _asked(context, seen)]
    if name in ("states", "question-states"):
        states = [context.shared["states"][:, at, pad:] for at, pad in enumerate(context.padding)]
        if name == "states":
            return states
        return [own[:, at] for own, (_, at) in zip(states, _asked(context, seen), strict=True)]
    return [row[pad:] for row, pad in zip(context.shared[name], context.padding, strict=True)]


def _remembered(name: str, episode: Episode, length: int, seen: Seen) -> Tensor:
    """A signal of what a robot saw before, by slot; zeros where it has seen nothing like it."""
    looks: EarlierLooks = episode.memory.get(EarlierLooks.NAME) or EarlierLooks()
    if name == "precision":
        return torch.tensor([float(looks.is_fine)])
    attention = name == "earlier-attention"
    frame = looks.frames[-looks.back :][0] if looks.frames else None
    known = looks.attention if attention else frame
    if known is None:
        width = seen.embed(torch.tensor([[seen.rows[0][0]]])).shape[-1]
        return torch.zeros(length) if attention else torch.zeros(length, width)
    return torch.cat((known, known.new_zeros(length, *known.shape[1:])))[:length]


def _asked(context: Context, seen: Seen) -> list[tuple[Sequence[int], Tensor]]:
    """Every row with the slots of its question: text behind the last picture, or all its text."""
    found = []
    for row in seen.rows:
        text = [at for at, token in enumerate(row) if token not in seen.visual]
        last = max((at for at, token in enumerate(row) if token in seen.visual), default=-1)
        behind = [at for at in text if at > last]
        found.append((row, _tensor(behind or text or [len(row) - 1], context)))
    return found


def _laid(seen: Seen) -> list[Tensor]:
    """The class token's attention by slot of every row; 0 at text."""
    if not seen.cls:  # no picture, so nobody asks
        return [torch.zeros(len(row)) for row in seen.rows]
    parts = [one[:, None] for one in seen.cls]
    found = pictures(parts, seen.rows, seen.placeholder, lambda *_: None)
    laid = []
    for row, own_parts in zip(seen.rows, found, strict=True):
        own = torch.zeros(len(row), device=seen.cls[0].device)
        for part in own_parts:
            own[part.positions] = part.values[:, 0]
        laid.append(own)
    return laid


def _tensor(values: Sequence[int], context: Context) -> Tensor:
    return torch.tensor(list(values), device=context.device)
