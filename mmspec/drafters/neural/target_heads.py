"""Heads on a target's states: their base class, their kind, and the states they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from mmspec.drafters.draft_model import DraftModel, DraftUpdate
from mmspec.models.loading import load_model, model_type, random_model
from mmspec.recipe import STATES, DraftModelKind
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory
from mmspec.targets.readers.backbone import MAX_RESERVED_SLOTS
from mmspec.targets.readers.guidance import guidance_scale, guide_logits
from mmspec.targets.readers.hooks import check_states
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context

Network = Callable[[Tensor, Tensor | None, Tensor, Cache], Tensor]  # states, mask, positions, cache


@dataclass(frozen=True, eq=False)
class LastStateModel(DraftModel):
    """Distributions that heads predict from the target's last states.

    Raises ValueError at construction for heads of another target, and for a target that does not
    provide states.
    """

    backbone: Reader  # the target's
    heads: Any
    sees: ClassVar[str] = STATES
    required_features: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def __post_init__(self) -> None:
        check_heads(self.heads, self.backbone)

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.heads,)


@dataclass(frozen=True, eq=False)
class HeadKind(DraftModelKind):
    """Heads of one class, bound to a target as a `draft`.

    `parts` are required values of their config, `sizes` what it takes from a target besides widths.
    `fill` initialises the buffers of random heads.
    """

    maker: type[PreTrainedModel]
    draft: Callable[[Reader, Any], DraftModel]
    description: str = "head"
    parts: Mapping[str, Any] = field(default_factory=dict)
    sizes: Callable[[Reader], Mapping[str, Any]] = lambda target: {}
    fill: Callable[[Any, int], None] | None = None  # (heads, seed)

    def accepts(self, model: Any) -> bool:
        return isinstance(model, self.maker) and self._has_parts(model.config)

    def owns(self, folder: Path) -> bool:
        config: Any = self.maker.config_class
        if not (folder / "config.json").exists() or model_type(folder) != config.model_type:
            return False
        return not self.parts or self._has_parts(config.from_pretrained(folder))

    def _has_parts(self, config: Any) -> bool:
        return all(getattr(config, name) == part for name, part in self.parts.items())

    def load(
        self, source: str | Path, target: Reader, dtype: torch.dtype | None = None
    ) -> PreTrainedModel:
        loaded: PreTrainedModel = load_model(self.maker, source, self.description, dtype)
        return loaded

    def skeleton(self, source: str | Path, target: Reader) -> PreTrainedModel:
        kind: Any = self.maker.config_class
        config = kind.from_pretrained(source)
        with torch.device("meta"):
            model: PreTrainedModel = self.maker(config)
        return model

    def default_sees(self, model: Any, target: Reader, requested: str) -> str:
        if requested not in ("auto", STATES):
            raise ValueError(
                f"sees={requested!r} does not fit: a {self.description} reads the target's states "
                f"({STATES!r}) and nothing else; drop sees=, or use another recipe"
            )
        return STATES

    def read(self, model: PreTrainedModel, target: Reader, sees: str) -> DraftModel:
        moved: Any = nn.Module.to(model, target.device, target.model.dtype)
        return self.draft(target, moved)

    def random(self, target: Reader, seed: int) -> Any:
        kind: Any = self.maker.config_class
        config = kind.of(target.config, target.vocabulary, **self.sizes(target), **self.parts)
        made = random_model(lambda: self.maker(config), seed)
        if self.fill is not None:
            self.fill(made, seed)
        return made


def check_heads(heads: Any, target: Reader) -> None:
    """Refuse a network that was not made for this target's states. Raises ValueError."""
    check_states(target)
    ours = (int(target.config.hidden_size), target.vocabulary)
    theirs = (heads.feature_size, heads.config.vocab_size)
    if ours != theirs:
        raise ValueError(
            f"this {type(heads).__name__} is for states {theirs[0]} wide over {theirs[1]} tokens, "
            f"but {type(target.model).__name__} has states {ours[0]} wide over {ours[1]} tokens; "
            "train one for this target with `mmspec train`"
        )


def check_axes(head: Any, target: Reader) -> None:
    """Refuse a head with M-RoPE for a target without known M-RoPE positions. Raises ValueError.

    The class of the head uses three axes by its config; the target's family declares its own axes.
    """
    if head.config.positions != "mrope" or target.family.rope_axes == 3:
        return
    name = type(target.model).__name__
    rope = getattr(target.config, "rope_parameters", None) or {}
    if rope.get("mrope_section"):
        raise ValueError(
            f"this head has rotary positions on three axes (M-RoPE), and so has {name}, but they "
            "are not read for heads yet; train a head with positions='keep', such as eagle-2"
        )
    raise ValueError(
        f"this head has rotary positions on three axes (M-RoPE), but {name} on one; train a head "
        "with positions='keep' for it"
    )


def prompt_padding(context: Context, count: int) -> list[int]:
    """Padding slots per row among the last `count` slots that the target has read."""
    before = max(context.memory.lengths[0] - count, 0)  # slots of earlier turns
    return [max(pad - before, 0) for pad in context.memory.padding]


def read_prompt(
    config: Any, context: Context, states: Tensor, network: Network
) -> tuple[Memory, Tensor]:
    """Read the states (R, L, D) of a prompt; returns the network's cache and outputs (R, L, D)."""
    count, pads = states.shape[1], prompt_padding(context, states.shape[1])
    cache = SlotCache(
        config, count + 1 + min(context.request.max_new_tokens + 64, MAX_RESERVED_SLOTS)
    )
    cache.plan_uniform(0, count)
    slots = torch.arange(count, device=states.device)
    start = torch.tensor(pads, device=states.device)[:, None]
    mask = slots >= start if any(pads) else None
    read = network(states, mask, (slots - start).clamp_min(0), cache)
    return Memory(cache, count, pads, [count - pad for pad in pads], states[:0, 0]), read


def accepted_states(
    context: Context, update: DraftUpdate, name: str
) -> list[Tensor]:  # (n, D) per row
    """The target's states of the accepted tokens that were read, for R rows."""
    states, states_per_row = update.scores.features[name], []
    for row in range(len(states)):
        path = update.round.path[row % context.batch]
        places = [0, *(node + 1 for node in path)]
        states_per_row.append(states[row, places[: len(update.round.tokens[row % context.batch])]])
    return states_per_row


def pad_left(rows: Sequence[Tensor]) -> Tensor:  # (n, D) each -> (R, width, D)
    """Stack rows of different lengths, padded on the left."""
    width = max(map(len, rows))
    fill = [own.new_zeros(width - len(own), own.shape[-1]) for own in rows]
    return torch.stack([torch.cat(pair) for pair in zip(fill, rows, strict=True)])


def guided_logits(context: Context, logits: Tensor) -> Tensor:  # (R, n, V) -> (B, n, V)
    """Combine the logits of both branches of guidance with the request's scale.

    Without guidance R is B, and the logits are unchanged.
    """
    guides = len(logits) > context.batch
    return guide_logits(logits, guidance_scale(context.request.inputs)) if guides else logits
