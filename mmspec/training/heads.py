"""Train a feature head to predict its target's hidden states.

reader = accelerate(model, "plain").backbone           # the target, frozen
head = FeatureHead(FeatureHeadConfig.of(reader.config, reader.vocabulary))
train_head(EAGLE, reader, head, examples, steps=2000, rate=1e-3)
head.save_pretrained(folder)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec._renamed import rename_attributes
from mmspec.draft import Draft, Kind
from mmspec.drafters.neural.feature_head import attention_of, check_head, tap_of
from mmspec.drafters.neural.head_prompt import HeadPrompt, TargetPrompt, head_prompt
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.heads.state_head import StateHead
from mmspec.models.llama_layers import AttentionMask, mask_by_kind
from mmspec.targets.memory import build_block
from mmspec.targets.readers.attention_tap import AttentionTap, count_question_tokens
from mmspec.targets.readers.hooks import HiddenStateHook, LayerStatesHook, wanted_layers
from mmspec.targets.readers.reader import Reader
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.packing import pack_outputs
from mmspec.training.trainable import HeadTraining

if TYPE_CHECKING:  # circular import
    from mmspec.training.prefixes import SharedPrefix


@dataclass(frozen=True)
class TrainingExample:
    """A batch of requests and response tokens, preferably the target's own.

    `inputs` are the target's: of `generate`, or, for an image model, its family's inputs of a
    request, with `guidance_scale` (other than 1) and `negative` to train both branches. `tokens`
    (B, T) follow the prompts; rows are padded with -1.
    """

    inputs: Mapping[str, Any]
    tokens: Tensor
    cache: FeatureCache | None = None  # of the target's outputs
    questions: Sequence[int] = ()  # cache keys of the rows
    pack: int | None = None  # tokens of sequences that several rows are packed into; None = none


def head_loss(
    reader: Reader,
    head: StateHead,
    example: TrainingExample,
    noise: float = 0.1,
    weight: float = 0.1,
) -> Tensor:  # ()
    """EAGLE's loss (Li et al. 2024, section 4.2).

    Smooth L1 between the states, plus `weight` times the cross entropy against the target's
    distribution, over the response tokens; input states have uniform noise of +-`noise`.
    """
    out, labels = predict_states(reader, head, example, noise)
    distribution = reader.head(labels).float().softmax(-1)
    log_q = reader.head(out).float().log_softmax(-1)
    likelihood: Tensor = (distribution * log_q).sum(-1).mean()
    return functional.smooth_l1_loss(out, labels) - weight * likelihood


def predict_states(
    reader: Reader, head: StateHead, example: TrainingExample, noise: float
) -> tuple[Tensor, Tensor]:  # (n, D) each
    """Return a head's states of the n real response tokens, and the target's as labels."""
    read, prompt = read_with_noise(reader, head, example, noise)
    slots = prompt.response_slots(read.next.shape[1])
    states = gather_slots(run_on_prompt(head, prompt), slots)
    return states[read.real], read.next[read.real]


def read_with_noise(
    reader: Reader, head: StateHead, example: TrainingExample, noise: float
) -> tuple[TargetOutputs, HeadPrompt]:
    """Read an example; return the target's outputs and the head's prompt with noisy states."""
    read = read_example(reader, example, *required_inputs(head, reader))
    return read, head_prompt(head, reader, add_noise(read.prompt, noise))


def required_inputs(head: StateHead, reader: Reader) -> tuple[str, frozenset[str]]:
    """Names of the target's features and attention that a head reads."""
    return tap_of(head, reader), attention_of(head, reader)


def new_head(target: Reader, counts: Tensor, **changes: Any) -> FeatureHead:
    """Make an untrained head for a target."""
    return FeatureHead(FeatureHeadConfig.of(target.config, target.vocabulary, **changes))


def check_continues(head: StateHead, reader: Reader) -> None:
    """Refuse a head whose states are not the target's last hidden states. Raises ValueError."""
    check_head(head, reader)
    if tap_of(head, reader) != "hidden":
        raise ValueError(
            f"the states of a {type(head).__name__} are not the target's, so it cannot be trained "
            "on them; train it by mmspec.training.self_fed.EAGLE3"
        )


EAGLE = HeadTraining(new_head, head_loss, check_continues, is_packable=True)


@dataclass(frozen=True)
class StatePairs:
    """The target's outputs as pairs: slot t holds token t + 1 and the state of token t.

    R rows are B, or 2B with both branches; L prompt slots precede T response slots.
    """

    embeds: Tensor  # (R, L + T - 1, D)
    states: Tensor  # (R, L + T - 1, D)
    seen: Tensor  # (R, L + T - 1) bool, False = left padding
    next: Tensor  # (R, T, D) labels of the last T slots
    real: Tensor  # (R, T) bool, False = padding


@dataclass(frozen=True)
class TargetOutputs:
    """The target's inputs and outputs of a training example."""

    prompt: TargetPrompt  # of L + T tokens
    next: Tensor  # (R, T, D) last hidden states, labels of the last T slots
    real: Tensor  # (R, T) bool, False = padding
    rows: Tensor | None = None  # (R, T) row of each token of packed sequences; None = as they are
    longest: int | None = None  # tokens of the longest response of packed rows

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response, padding included where rows are not packed."""
        return self.next.shape[1] if self.longest is None else self.longest

    def is_followed(self, is_label: Tensor, late: int) -> Tensor:  # (R, T) -> (R, T - late)
        """Whether token t + `late` is a label, and of the same row as token t."""
        found = is_label[:, late:]
        if self.rows is None:
            return found
        return found & (self.rows[:, late:] == self.rows[:, : self.rows.shape[1] - late])


def read_pairs(reader: Reader, example: TrainingExample) -> StatePairs:
    """Run the target on an example."""
    found = read_example(reader, example, "hidden")
    prompt = found.prompt
    slots = torch.arange(prompt.embeds.shape[1] - 1, device=prompt.embeds.device)
    seen = slots >= torch.tensor(prompt.padding, device=slots.device)[:, None]
    return StatePairs(prompt.embeds[:, 1:], prompt.features[:, :-1], seen, found.next, found.real)


@torch.no_grad()
def read_example(
    reader: Reader,
    example: TrainingExample,
    tap: str,
    attention: frozenset[str] = frozenset(),
    hook: AbstractContextManager[Any] | None = None,
) -> TargetOutputs:
    """Run the target on an example, and record features and attention of these names.

    `hook` is entered while it reads the response. An example with a cache is read from there if all
    rows are cached, else added. With `pack` its rows are packed. Raises ValueError for attention or
    a `hook` with a cache, which cannot hold their outputs.
    """
    found = _read_rows(reader, example, tap, attention, hook)
    return found if example.pack is None else pack_outputs(found, example.pack)


def _read_rows(
    reader: Reader,
    example: TrainingExample,
    tap: str,
    attention: frozenset[str],
    hook: AbstractContextManager[Any] | None,
) -> TargetOutputs:
    """Outputs from the cache, or of the target."""
    cache = example.cache
    if cache is None:
        return read_by_target(reader, example, tap, attention, hook)
    if attention or hook is not None:
        raise ValueError(
            "this head is trained on more than the target's hidden states, such as attention, "
            "which no cache holds; drop --cache"
        )
    if not all(cache.contains(tap, one) for one in example.questions):
        cache_outputs(reader, example, tap)
    tokens, real = example.tokens.clamp_min(0), example.tokens >= 0
    ids = _ids(example.inputs, tokens, len(tokens))
    prompt, after = cache.rows(example.questions, ids, real, reader.embed(tokens))
    return TargetOutputs(prompt, after, real)


@torch.no_grad()
def cache_outputs(reader: Reader, example: TrainingExample, tap: str) -> None:
    """Run the target on an example, and add its outputs to the example's cache."""
    assert example.cache is not None
    read = read_by_target(reader, example, tap)
    example.cache.add(example.questions, read, tap)


@torch.no_grad()
def read_by_target(
    reader: Reader,
    example: TrainingExample,
    tap: str,
    attention: frozenset[str] = frozenset(),
    hook: AbstractContextManager[Any] | None = None,
    prefix: SharedPrefix | None = None,
) -> TargetOutputs:
    """Run the target on an example; on what follows a `prefix` that was read."""
    tokens = example.tokens.clamp_min(0)
    layers = wanted_layers({tap}).get(tap, ())
    tapped = _tap(reader, example, attention)
    past: dict[str, Any] = {} if prefix is None else {"past": prefix.past}
    with HiddenStateHook(reader) as prompt, LayerStatesHook(reader, layers) as before, tapped:
        memory, _, _ = reader.prefill(example.inputs, extra_slots=tokens.shape[1], **past)
    response = Draft.chain(tokens[:, 1:], Kind.DET)
    layout = build_block(tokens[:, :1].tolist(), response, memory.like)
    with LayerStatesHook(reader, layers) as later, hook or nullcontext():
        _, after = reader.read(memory, layout, hidden=True)
    assert after is not None
    branches = len(after) // len(tokens)
    new = reader.embed(tokens).repeat(branches, 1, 1)
    features = torch.cat(
        (before.offer(), later.offer(tokens.shape[1])) if layers else (prompt.hidden, after), 1
    )
    target_prompt = TargetPrompt(
        torch.cat((prompt.embeds, new), 1),
        features,
        memory.padding,
        _ids(example.inputs, tokens, len(features)),
        _extend_positions(prompt.positions, tokens.shape[1]),
        _to_prompt(tapped, tokens.shape[1]),
        tokens.shape[1],
    )
    if prefix is not None:
        target_prompt = prefix.prepend_to(target_prompt)
    return TargetOutputs(target_prompt, after, (example.tokens >= 0).repeat(branches, 1))


def _tap(
    reader: Reader, example: TrainingExample, attention: frozenset[str]
) -> AbstractContextManager[Any]:
    if not attention:
        return nullcontext()
    return AttentionTap(reader, attention, count_question_tokens(example.inputs, reader.visual_ids))


def _to_prompt(tapped: Any, count: int) -> dict[str, Tensor]:  # (R, L + count) each
    """Attention to every token of a prompt, padded with zeros for `count` more tokens."""
    recorded = tapped.offer() if isinstance(tapped, AttentionTap) else {}
    return {name: functional.pad(one, (0, count)) for name, one in recorded.items()}


def _ids(inputs: Mapping[str, Any], tokens: Tensor, rows: int) -> Tensor | None:
    """Return the ids of prompt and response; None where unknown."""
    ids = inputs.get("input_ids")
    return None if ids is None or len(ids) != rows else torch.cat((ids, tokens), 1)


def _extend_positions(positions: Tensor | None, count: int) -> Tensor | None:
    """Return a prompt's positions and those of `count` tokens after it."""
    if positions is None:
        return None
    steps = torch.arange(1, count + 1, device=positions.device)
    return torch.cat((positions, positions[..., -1:] + steps), -1)


def add_noise(prompt: TargetPrompt, noise: float) -> TargetPrompt:
    """Add uniform noise of +-`noise` to the features of a prompt's slots."""
    features = prompt.features[:, :-1]
    features = features + noise * (2 * torch.rand_like(features) - 1)
    return replace(prompt, features=torch.cat((features, prompt.features[:, -1:]), 1))


def run_on_prompt(head: StateHead, read: HeadPrompt) -> Tensor:  # (R, n, D)
    """Run a head on all slots of a prompt; return its states."""
    mask: AttentionMask = read.attention_mask if any(read.pads) else None
    if read.segments is not None:
        slots = torch.arange(read.embeds.shape[1], device=read.embeds.device)
        mask = mask_by_kind(head.config, additive_mask(read), slots, slots)
    out: Tensor = head(read.embeds, read.states, mask, read.positions, marks=read.marks)
    return out


def additive_mask(read: HeadPrompt) -> Tensor:  # (R, 1, n, n)
    """The causal mask of a prompt's slots, in the dtype of their states."""
    seen, dtype = read.causal_mask(), read.states.dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def gather_slots(states: Tensor, slots: Tensor) -> Tensor:  # (R, n, D), (R, T) -> (R, T, D)
    """The states at `slots`."""
    return states.gather(1, slots[..., None].expand(-1, -1, states.shape[-1]))


__getattr__ = rename_attributes(__name__, {"Lesson": "TrainingExample"})
