"""Shared by tests of feature heads: heads, a recorder of distributions, and a slow reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.drafters.draft_model import DraftModel, DraftNodes, DraftUpdate
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Shape
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.targets.readers.guidance import guide_logits
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context
from mmspec.training.heads import EAGLE, StatePairs, TrainingExample, read_pairs
from mmspec.training.trainable import train_head
from tests.toys.readers import backbone


def untrained_head(model: Any, seed: int = 0, gain: float = 1.2) -> FeatureHead:
    """A head of a toy, with wide weights, so that its output depends on all inputs."""
    reader = backbone(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        head = FeatureHead(FeatureHeadConfig.of(reader.config, reader.vocabulary))
        head.train(False)
        for weight in head.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, gain / weight.shape[1] ** 0.5)
    return head


def overfit_head(
    model: Any, example: TrainingExample, steps: int = 80, layers: int = 1
) -> FeatureHead:
    """A head overfitted to one example."""
    reader = backbone(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = FeatureHeadConfig.of(reader.config, reader.vocabulary, num_hidden_layers=layers)
        head = FeatureHead(config)
        train_head(EAGLE, reader, head, endless(example), steps, rate=5e-3)
    return head


def endless(example: TrainingExample) -> Iterator[TrainingExample]:
    while True:
        yield example


@dataclass
class RecordedDistribution:
    """A predicted distribution and its prefix."""

    lengths: tuple[int, ...]  # committed tokens per row
    distribution: Categorical
    nodes: DraftNodes | None = None  # None = it followed the committed tokens


@dataclass
class Recorder(DraftModel):
    """A feature head that records its distributions."""

    inner: FeatureDraft
    recorded: list[RecordedDistribution] = field(default_factory=list)

    @property
    def sees(self) -> str:
        return self.inner.sees

    @property
    def required_features(self) -> frozenset[str]:
        return self.inner.required_features

    def begin(self, context: Context) -> Any:
        return self.inner.begin(context)

    def predict_first(self, context: Context, state: Any) -> Categorical:
        self.recorded.append(
            RecordedDistribution(context.lengths, self.inner.predict_first(context, state))
        )
        return self.recorded[-1].distribution

    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
        self.recorded.append(
            RecordedDistribution(context.lengths, self.inner.predict(context, state, nodes), nodes)
        )
        return self.recorded[-1].distribution

    def keep(self, context: Context, state: Any, update: DraftUpdate) -> Any:
        return self.inner.keep(context, state, update)


class Late(Recorder):
    """Wrong: every state is that of the token before."""

    def keep(self, context: Context, state: Any, update: DraftUpdate) -> Any:
        late = update.scores.features["hidden"].roll(1, dims=1)
        scores = replace(update.scores, features={"hidden": late})
        return self.inner.keep(context, state, replace(update, scores=scores))


def drafting(model: Any, head: FeatureHead, shape: Shape, wrap: Any = Recorder) -> Any:
    """A drafter around a recorder."""
    reader = backbone(model)
    return Autoregressive(wrap(FeatureDraft(reader, head)), shape)


@torch.no_grad()
def slow(
    model: Any,
    head: FeatureHead,
    example: TrainingExample,
    prompts: list[int],
    recorded: list[RecordedDistribution],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Recorded logits, and the same without cache, tree or batch, row by row.

    The target reads prompt and answer from scratch; the head reads the pairs of a node's own path.
    """
    reader = backbone(model)
    pairs, scale = read_pairs(reader, example), float(example.inputs.get("guidance_scale", 1.0))
    read_nodes: list[DraftNodes] = []
    for one in recorded:
        if one.nodes is None:
            read_nodes = []
        else:
            read_nodes.append(one.nodes)
        for row, length in enumerate(one.lengths):
            if length - prompts[row] >= example.tokens.shape[1]:  # the row has finished
                continue
            for place, path in paths(read_nodes, row):
                logits = along(reader, head, pairs, row, length - prompts[row], path, scale)
                yield one.distribution.scores[row, place], logits


def paths(read_nodes: list[DraftNodes], row: int) -> list[tuple[int, list[int]]]:
    """Reading indices of the last nodes, and the tokens of their paths."""
    if not read_nodes:
        return [(0, [])]
    known: list[list[int]] = [[]]
    for nodes in read_nodes:
        parent = nodes.layout.parents.expand(len(nodes.tokens), -1)[row].tolist()
        tokens = nodes.tokens[row].tolist()
        known += [[*known[at], token] for at, token in zip(parent, tokens, strict=True)]
    count = read_nodes[-1].tokens.shape[1]
    return list(enumerate(known[-count:]))


def along(
    reader: Reader,
    head: FeatureHead,
    pairs: StatePairs,
    row: int,
    new: int,
    path: list[int],
    scale: float,
) -> Tensor:  # (V,)
    """The head's logits after `new` tokens of a row and a path of its own."""
    batch = len(pairs.next) if scale == 1 else len(pairs.next) // 2
    width = pairs.embeds.shape[1] - pairs.next.shape[1] + new  # slots of true states
    logits_by_token = []
    for at in range(row, len(pairs.next), batch):
        keep = pairs.seen[at, :width]
        embeds, states = pairs.embeds[at, :width][keep], pairs.states[at, :width][keep]
        for token in path:
            last = head(embeds[None], states[None])[0, -1:]
            embeds = torch.cat((embeds, reader.embed(torch.tensor([[token]]))[0]))
            states = torch.cat((states, last))
        logits_by_token.append(reader.head(head(embeds[None], states[None])[:, -1]))
    logits = torch.cat(logits_by_token)
    return (logits if scale == 1 else guide_logits(logits, scale))[0]


def greedy_example(model: Any, inputs: dict[str, Any], room: int) -> tuple[TrainingExample, Tensor]:
    """The greedy output of a text model, as a training example and as a sequence."""
    plain = mmspec.decode_plain(model, **inputs, max_new_tokens=room, do_sample=False)
    out: Tensor = plain.sequences
    return TrainingExample(inputs, out[:, inputs["input_ids"].shape[1] :]), out
