"""What tests of feature heads share: heads, a recorder of what they say, and a slow reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.drafters.growth import DraftModel, News, Nodes, Shape
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.targets.readers.guidance import guided
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context
from mmspec.training.heads import EAGLE, Lesson, Pairs, read
from mmspec.training.trainable import learn
from tests.toys.readers import backbone


def untrained(model: Any, seed: int = 0, gain: float = 1.2) -> FeatureHead:
    """A head of a toy, with wide weights: what it says depends on everything it reads."""
    reader = backbone(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        head = FeatureHead(FeatureHeadConfig.of(reader.config, reader.vocabulary))
        head.train(False)
        for weight in head.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, gain / weight.shape[1] ** 0.5)
    return head


def trained(model: Any, lesson: Lesson, steps: int = 80, layers: int = 1) -> FeatureHead:
    """A head that has read one lesson again and again."""
    reader = backbone(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = FeatureHeadConfig.of(reader.config, reader.vocabulary, num_hidden_layers=layers)
        head = FeatureHead(config)
        learn(EAGLE, reader, head, endless(lesson), steps, rate=5e-3)
    return head


def endless(lesson: Lesson) -> Iterator[Lesson]:
    while True:
        yield lesson


@dataclass
class Heard:
    """One distribution that was given, and what it followed."""

    lengths: tuple[int, ...]  # committed tokens per row
    distribution: Categorical
    nodes: Nodes | None = None  # None = it followed the committed tokens


@dataclass
class Recorder(DraftModel):
    """A feature head that notes all it says."""

    inner: FeatureDraft
    heard: list[Heard] = field(default_factory=list)

    @property
    def sees(self) -> str:
        return self.inner.sees

    @property
    def wants(self) -> frozenset[str]:
        return self.inner.wants

    def begin(self, context: Context) -> Any:
        return self.inner.begin(context)

    def predict_first(self, context: Context, state: Any) -> Categorical:
        self.heard.append(Heard(context.lengths, self.inner.predict_first(context, state)))
        return self.heard[-1].distribution

    def predict(self, context: Context, state: Any, nodes: Nodes) -> Categorical:
        self.heard.append(Heard(context.lengths, self.inner.predict(context, state, nodes), nodes))
        return self.heard[-1].distribution

    def keep(self, context: Context, state: Any, news: News) -> Any:
        return self.inner.keep(context, state, news)


class Late(Recorder):
    """Wrong: every state is that of the token before."""

    def keep(self, context: Context, state: Any, news: News) -> Any:
        late = news.scores.features["hidden"].roll(1, dims=1)
        scores = replace(news.scores, features={"hidden": late})
        return self.inner.keep(context, state, replace(news, scores=scores))


def drafting(model: Any, head: FeatureHead, shape: Shape, wrap: Any = Recorder) -> Any:
    """A drafter around a recorder."""
    reader = backbone(model)
    return Autoregressive(wrap(FeatureDraft(reader, head)), shape)


@torch.no_grad()
def slow(
    model: Any, head: FeatureHead, lesson: Lesson, prompts: list[int], heard: list[Heard]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits that were given and the same without memory, tree or batch, row by row.

    The target reads prompt and answer from scratch; the head reads the pairs of a node's own path.
    """
    reader = backbone(model)
    pairs, scale = read(reader, lesson), float(lesson.inputs.get("guidance_scale", 1.0))
    spoken: list[Nodes] = []
    for one in heard:
        if one.nodes is None:
            spoken = []
        else:
            spoken.append(one.nodes)
        for row, length in enumerate(one.lengths):
            if length - prompts[row] >= lesson.tokens.shape[1]:  # the row has finished
                continue
            for place, path in paths(spoken, row):
                logits = along(reader, head, pairs, row, length - prompts[row], path, scale)
                yield one.distribution.scores[row, place], logits


def paths(spoken: list[Nodes], row: int) -> list[tuple[int, list[int]]]:
    """Places of the last nodes spoken of, and the tokens down to them."""
    if not spoken:
        return [(0, [])]
    known: list[list[int]] = [[]]
    for nodes in spoken:
        parent = nodes.layout.parents.expand(len(nodes.tokens), -1)[row].tolist()
        tokens = nodes.tokens[row].tolist()
        known += [[*known[at], token] for at, token in zip(parent, tokens, strict=True)]
    count = spoken[-1].tokens.shape[1]
    return list(enumerate(known[-count:]))


def along(
    reader: Reader,
    head: FeatureHead,
    pairs: Pairs,
    row: int,
    new: int,
    path: list[int],
    scale: float,
) -> Tensor:  # (V,)
    """The head's logits behind `new` tokens of a row and a path of its own."""
    batch = len(pairs.next) if scale == 1 else len(pairs.next) // 2
    width = pairs.embeds.shape[1] - pairs.next.shape[1] + new  # slots of true states
    said = []
    for at in range(row, len(pairs.next), batch):
        keep = pairs.seen[at, :width]
        embeds, states = pairs.embeds[at, :width][keep], pairs.states[at, :width][keep]
        for token in path:
            last = head(embeds[None], states[None])[0, -1:]
            embeds = torch.cat((embeds, reader.embed(torch.tensor([[token]]))[0]))
            states = torch.cat((states, last))
        said.append(reader.head(head(embeds[None], states[None])[:, -1]))
    logits = torch.cat(said)
    return (logits if scale == 1 else guided(logits, scale))[0]


def answer(model: Any, inputs: dict[str, Any], room: int) -> tuple[Lesson, Tensor]:
    """What a text model says greedily, as a lesson and as a sequence."""
    plain = mmspec.decode_plain(model, **inputs, max_new_tokens=room, do_sample=False)
    out: Tensor = plain.sequences
    return Lesson(inputs, out[:, inputs["input_ids"].shape[1] :]), out
