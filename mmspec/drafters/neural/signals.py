"""Signals that compressors use besides image features: attention, states, the question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.codes.episodes import Episode, VisualHistory, get_episodes
from mmspec.compressors.contract import OF_ROBOTS, Features, split_features
from mmspec.targets.tokens.context import Context

OF_TARGET = frozenset(  # by slot of the target's prompt
    {
        *("attention", "question-attention", "last-layer-attention"),
        *("states", "question-states"),
    }
)


@dataclass(frozen=True)
class FeaturePrompt:
    """The prompt of the features of a request, and signals of the model that computed them."""

    rows: Sequence[Sequence[int]]  # token ids, without padding
    visual: frozenset[int]  # ids that are not text
    embed: Callable[[Tensor], Tensor]  # (1, T) ids -> (1, T, H) embeddings
    cls: Sequence[Tensor] = ()  # per picture (n,)
    placeholder: int = -1  # of the images in `cls`


def required_signals(needs: frozenset[str]) -> frozenset[str]:
    """Features that the target must provide for the signals `needs`."""
    offered = needs & OF_TARGET - {"question-states"}
    return offered | ({"states"} if "question-states" in needs else frozenset())


def collect_signals(
    needs: frozenset[str], context: Context, prompt: FeaturePrompt
) -> Callable[[int, Features], Mapping[str, Tensor]]:
    """Return the function from row and image to their signals.

    Raises ValueError where the signals of the target belong to another prompt than the features.
    """
    if needs & OF_TARGET:
        _check_same(needs, context, prompt)
    values = {name: _per_row(name, context, prompt) for name in needs}

    def of(row: int, image: Features) -> Mapping[str, Tensor]:
        return {
            name: _select_slots(name, rows[row], image.positions) for name, rows in values.items()
        }

    return of


def _select_slots(name: str, value: Tensor, slots: Tensor) -> Tensor:
    """A row's signal, restricted to the image's slots where it is indexed by slot."""
    if name in ("text", "question-states", "precision"):
        return value
    return value[:, slots] if name == "states" else value[slots]


def _check_same(needs: frozenset[str], context: Context, prompt: FeaturePrompt) -> None:
    prompts = zip(context.history, context.prompt, strict=True)
    if [row[:length] for row, length in prompts] != [list(row) for row in prompt.rows]:
        raise ValueError(
            f"the compressor needs {', '.join(sorted(needs & OF_TARGET))} of the target, but the "
            "draft model has another prompt (drafter_inputs=), whose slots are not the target's; "
            "give both the same, or choose a compressor without signals of the target"
        )


def _per_row(name: str, context: Context, prompt: FeaturePrompt) -> list[Tensor]:
    """One signal for every row: by slot, or for the question."""
    if name == "cls":
        return _class_attention(prompt)
    if name in OF_ROBOTS:
        rows = zip(get_episodes(context), prompt.rows, strict=True)
        return [_earlier_signal(name, episode, len(row), prompt) for episode, row in rows]
    if name == "text":
        return [
            prompt.embed(_tensor(row, context)[None, at])[0]
            for row, at in _question_slots(context, prompt)
        ]
    if name in ("states", "question-states"):
        states = [context.shared["states"][:, at, pad:] for at, pad in enumerate(context.padding)]
        if name == "states":
            return states
        return [
            own[:, at]
            for own, (_, at) in zip(states, _question_slots(context, prompt), strict=True)
        ]
    return [row[pad:] for row, pad in zip(context.shared[name], context.padding, strict=True)]


def _earlier_signal(name: str, episode: Episode, length: int, prompt: FeaturePrompt) -> Tensor:
    """A signal of a robot's earlier images, by slot; zeros where there is none."""
    history: VisualHistory = episode.memory.get(VisualHistory.NAME) or VisualHistory()
    if name == "precision":
        return torch.tensor([float(history.is_fine)])
    attention = name == "earlier-attention"
    frame = history.frames[-history.back :][0] if history.frames else None
    recorded = history.attention if attention else frame
    if recorded is None:
        width = prompt.embed(torch.tensor([[prompt.rows[0][0]]])).shape[-1]
        return torch.zeros(length) if attention else torch.zeros(length, width)
    return torch.cat((recorded, recorded.new_zeros(length, *recorded.shape[1:])))[:length]


def _question_slots(context: Context, prompt: FeaturePrompt) -> list[tuple[Sequence[int], Tensor]]:
    """Every row with the slots of its question: text after the last image, or all its text."""
    found = []
    for row in prompt.rows:
        text = [at for at, token in enumerate(row) if token not in prompt.visual]
        last = max((at for at, token in enumerate(row) if token in prompt.visual), default=-1)
        after_images = [at for at in text if at > last]
        found.append((row, _tensor(after_images or text or [len(row) - 1], context)))
    return found


def _class_attention(prompt: FeaturePrompt) -> list[Tensor]:
    """The class token's attention by slot of every row; 0 at text."""
    if not prompt.cls:  # no images
        return [torch.zeros(len(row)) for row in prompt.rows]
    parts = [one[:, None] for one in prompt.cls]
    found = split_features(parts, prompt.rows, prompt.placeholder, lambda *_: None)
    rows = []
    for row, own_parts in zip(prompt.rows, found, strict=True):
        own = torch.zeros(len(row), device=prompt.cls[0].device)
        for part in own_parts:
            own[part.positions] = part.values[:, 0]
        rows.append(own)
    return rows


def _tensor(values: Sequence[int], context: Context) -> Tensor:
    return torch.tensor(list(values), device=context.device)
