"""Shared by tests of heads that draft a block at once: heads, a recorder, and a slow reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import mmspec
from mmspec import recipes
from mmspec.distributions.categorical import Categorical
from mmspec.drafters.draft_model import DraftModel, DraftNodes, DraftUpdate
from mmspec.drafters.neural.amphista import AmphistaDraft
from mmspec.drafters.neural.dflash import DFlashDraft
from mmspec.drafters.neural.feature_head import tap_of
from mmspec.drafters.neural.p_eagle import PEagleDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.parallel_chain import ParallelChain
from mmspec.models.heads.dflash import DFlashHead
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context
from mmspec.training.heads import TargetOutputs, read_example
from mmspec.training.trainable import train_head
from tests import toys
from tests.drafters.heads import endless
from tests.drafters.state_heads import lesson, target, true_slots
from tests.toys.readers import backbone

ROOM = 10
DRAFTS: dict[str, Any] = {
    "amphista": AmphistaDraft,
    "dflash": DFlashDraft,
    "p-eagle": PEagleDraft,
}
SIZES: dict[str, dict[str, Any]] = {
    "dflash": {"num_hidden_layers": 2, "block_size": 5, "num_taps": 3},
    "p-eagle": {"num_depths": 4},
    "amphista": {"num_heads": 4},
}


def new_head(name: str, family: str, **changes: Any) -> Any:
    """An untrained head of the recipe for the family's toy."""
    training, reader = recipes.get(name).training, backbone(target(family))
    assert training is not None
    counts = torch.ones(reader.vocabulary, dtype=torch.int64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head: Any = training.begin(reader, counts, **{**SIZES[name], **changes})
    return head.train(False)


@lru_cache(maxsize=8)
def trained_head(name: str, family: str, steps: int = 80) -> Any:
    """A head overfitted to the greedy answers of three ragged rows."""
    training: Any = recipes.get(name).training
    head = new_head(name, family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        examples = endless(lesson(family, 3))
        train_head(training, backbone(target(family)), head, examples, steps, rate=4e-3)
    return head


@dataclass
class Recorder(DraftModel):
    """A draft model that records the logits of every block, and the tokens before it."""

    inner: Any
    recorded: list[tuple[tuple[int, ...], Tensor]] = field(default_factory=list)
    is_parallel = True

    @property
    def sees(self) -> str:
        return str(self.inner.sees)

    @property
    def required_features(self) -> frozenset[str]:
        found: frozenset[str] = self.inner.required_features
        return found

    def begin(self, context: Context) -> Any:
        return self.inner.begin(context)

    def predict_first(self, context: Context, state: Any) -> Categorical:
        found: Categorical = self.inner.predict_first(context, state)
        self.recorded.append((context.lengths, state.logits))
        return found

    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
        found: Categorical = self.inner.predict(context, state, nodes)
        return found

    def keep(self, context: Context, state: Any, update: DraftUpdate) -> Any:
        return self.inner.keep(context, state, update)


class Late(Recorder):
    """Wrong: every state is that of the token before."""

    def keep(self, context: Context, state: Any, update: DraftUpdate) -> Any:
        features = {name: one.roll(1, 1) for name, one in update.scores.features.items()}
        scores = replace(update.scores, features=features)
        return self.inner.keep(context, state, replace(update, scores=scores))


def record(name: str, family: str, head: Any, batch: int, wrap: type[Recorder]) -> Recorder:
    """The blocks of a greedy run, checked to be the target's output."""
    recorder = wrap(DRAFTS[name](backbone(target(family)), head))
    given = toys.inputs(family, batch=batch, ragged=batch > 1)
    drafter = Autoregressive(recorder, ParallelChain(4))
    fast = mmspec.accelerate(target(family), name, drafter=drafter)
    out = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
    ids = given["input_ids"].shape[1]
    assert torch.equal(out.sequences[:, ids:], lesson(family, batch).tokens)
    return recorder


@torch.no_grad()
def slow(
    name: str, family: str, head: Any, batch: int, recorder: Recorder
) -> Iterator[tuple[Tensor, Tensor]]:
    """Recorded logits (K, V) of unfinished rows, and the same from scratch: no cache, no batch."""
    reader, example = backbone(target(family)), lesson(family, batch)
    read = read_example(reader, example, tap_of(head, reader))
    prompts = example.inputs["attention_mask"].sum(-1).tolist()
    block: Any = {
        "amphista": amphista_block,
        "dflash": dflash_block,
        "p-eagle": p_eagle_block,
    }[name]
    for lengths, logits in recorder.recorded:
        for row, length in enumerate(lengths):
            new = length - prompts[row]
            if new < example.tokens.shape[1]:
                yield logits[row], block(reader, head, read, row, new)


def dflash_block(
    reader: Reader, head: DFlashHead, read: TargetOutputs, row: int, new: int
) -> Tensor:  # (K, V)
    """Logits after `new` tokens of a row, from a context of all tokens but the last."""
    prompt, config = read.prompt, head.config
    assert prompt.tokens is not None
    pad = prompt.padding[row]
    end = prompt.tokens.shape[1] - read.next.shape[1] + new
    features, tokens = prompt.features[row, pad : end - 1], prompt.tokens[row, pad:end]
    places = torch.arange(len(tokens) + head.reach)[None]
    if config.positions == "mrope":
        assert prompt.positions is not None
        known = prompt.positions[-3:].expand(3, len(prompt.tokens), -1)[:, row, pad:end]
        steps = torch.arange(1, head.reach + 1)
        places = torch.cat((known, known[:, -1:] + steps), -1)[:, None]
    kept = torch.arange(len(features))
    if config.visual_slots == "hidden":
        visual = torch.isin(tokens[:-1], tokens.new_tensor(reader.placeholder_ids))
        kept = kept[~visual]
    cache = DynamicCache()
    head.cache_context(head.fuse(features[kept])[None], places[..., kept], cache)
    masks = tokens.new_full((head.reach,), config.mask_token_id)
    block = torch.cat((tokens[-1:], masks))[None]
    mask = torch.zeros(1, 1, block.shape[1], len(kept) + block.shape[1])
    out = head(reader.embed(block), mask, places[..., -block.shape[1] :], cache)
    return head.expand_logits(head.logits(out[0, 1:], reader.head))


def p_eagle_block(
    reader: Reader, head: Any, read: TargetOutputs, row: int, new: int
) -> Tensor:  # (K, V)
    """Logits after `new` tokens of a row, from true and unknown slots."""
    slots, where = true_slots(reader, head, read, row, new)
    count = head.config.num_depths - 1
    table = head.embeddings or reader.embed
    unknown = table(torch.full((count,), head.config.mask_token_id))
    embeds = torch.cat((torch.stack([one[0] for one in slots]), unknown))
    states = torch.cat((torch.stack([one[1] for one in slots]), head.mask_states(count)[0]))
    places = [torch.as_tensor(one[4]) for one in slots]
    later = [torch.as_tensor(where + step) for step in range(count)]
    positions = torch.stack([*places, *later], -1)[..., None, :]
    out = head(embeds[None], states[None], None, positions)[0, -count - 1 :]
    logits: Tensor = head.expand_logits(head.logits(out, reader.head))
    return logits


def amphista_block(
    reader: Reader, head: Any, read: TargetOutputs, row: int, new: int
) -> Tensor:  # (K, V)
    """Logits of all heads after the newest slot."""
    slots, _ = true_slots(reader, head, read, row, new)
    embeds = torch.stack([one[0] for one in slots])[None]
    states = torch.stack([one[1] for one in slots])[None]
    places = torch.stack([torch.as_tensor(one[4]) for one in slots], -1)[..., None, :]
    logits: Tensor = reader.head(head.predict_block(head(embeds, states, None, places)[0, -1]))
    return logits
