"""Group tree optimisation: train a head further by the trees that it drafts (GTO).

    mmspec train gto --target llava --head eagle-2-head --data questions.jsonl --out head

Hu et al. 2026, "Bridging draft policy misalignment: group tree optimization for speculative
decoding". Other losses are of single tokens, but a tree is what is drafted. Its reward is the
expected number of accepted tokens, computed from the target's distributions at all nodes: the sum
over nodes of the product of p along the path. At a group of consecutive tokens of a response the
head and a frozen copy of what it was grow a tree each:

    gain       reward of the head's tree - reward of the copy's; a difficult place is so for both
    advantage  gain, standardised over the group
    ratio      of the likelihoods of the tree's longest accepted path, per token, head over copy
    loss       - min(ratio advantage, clip(ratio) advantage), and the head's usual loss

The usual loss (HASS's or EAGLE-3's) also starts the training, since two equal heads have no gain.
The result is a head as before. Reconstructed: the path is that of the response, and the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Kind, Round, Verdict
from mmspec.drafters.neural.feature_head import FeatureDraft, check_head
from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.eagle3 import Eagle3Head
from mmspec.models.heads.state_head import StateHead
from mmspec.recipe import DraftModelKind
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Request, append_tokens
from mmspec.training.fitting import ScheduledOptimizer
from mmspec.training.heads import TargetOutputs, TrainingExample, read_example, required_inputs
from mmspec.training.self_fed import aligned_loss, eagle3_loss, unroll_passes
from mmspec.training.trainable import HeadTraining

TREE = DynamicTree(depth=6, beam=10, nodes=59, kinds=(Kind.DET,))
_MIN_DEVIATION = 1e-4  # of gains, in tokens: smaller ones are rounding


class ReferencedHead(nn.Module):
    """A head in training, and a frozen copy of what it was."""

    def __init__(self, head: StateHead) -> None:
        super().__init__()
        self.head, self.reference = head, copy.deepcopy(head).requires_grad_(False)

    @property
    def config(self) -> Any:
        return self.head.config

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the head alone."""
        self.head.save_pretrained(folder)


@dataclass(frozen=True)
class TreeGroup:
    """Trees after m prefixes of each response."""

    rewards: Tensor  # (B, m) expected accepted tokens
    lengths: Tensor  # (B, m) nodes of the longest path that is the response's


def tree_reward(draft: Draft, target: Categorical) -> Tensor:  # (B,)
    """Expected accepted tokens of trees without equal siblings; `target` (B, N + 1) is p."""
    rows = torch.arange(draft.batch, device=draft.tokens.device)[:, None]
    log_p = target.log_probs[rows, draft.parents + 1, draft.tokens].clamp_min(-100)
    paths = (draft.reach[:, 1:] * log_p[:, None].float()).sum(-1)
    return (paths.exp() * draft.mask).sum(-1)


def accepted_length(draft: Draft, tokens: Tensor) -> Tensor:  # (B, n) -> (B,)
    """Tokens of the longest path of each tree that `tokens` begin with; -1 = no token."""
    depths = draft.depths()
    short = max(0, int(depths.max()) + 1 - tokens.shape[1])
    wanted = functional.pad(tokens, (0, short), value=-1).gather(1, depths)
    hits = ((draft.tokens == wanted) & draft.mask).float()
    counts = (draft.reach[:, 1:] * hits[:, None]).sum(-1).long()
    return torch.where(counts == depths + 1, counts, 0).amax(-1)


@torch.no_grad()
def grow_group(
    reader: Reader, head: StateHead, example: TrainingExample, start: int, count: int, tree: Any
) -> TreeGroup:
    """Grow and score the trees after `start` + 1, ..., `start` + `count` tokens of a response.

    The decoding loop of one request, that takes the response's tokens whatever is drafted.
    """
    model = FeatureDraft(reader, head)
    drafter = Autoregressive(model, tree, Kind.DET)
    target = CausalTarget(reader, model.required_features, checks=False, uses_trees=True)
    tokens, batch = example.tokens.clamp_min(0), len(example.tokens)
    inputs = append_tokens(reader, example.inputs, tokens[:, :start]) if start else example.inputs
    noise = KeyedNoise.from_seed(0, batch, reader.device)
    limit = count + tree.max_depth + 2
    context = target.prefill(Request(inputs, Sampling(do_sample=True), noise, limit))
    state, rewards, lengths = drafter.begin(context), list[Tensor](), list[Tensor]()
    draft, scores = context.empty_draft(), context.scores
    for step in range(count + 1):
        if step:
            draft = drafter.propose(context, state)
            scores = target.score(context, draft)
            assert isinstance(scores.distribution, Categorical)
            rewards.append(tree_reward(draft, scores.distribution))
            lengths.append(accepted_length(draft, example.tokens[:, start + step :]))
        round_ = take_tokens(step, draft, tokens[:, start + step])
        context = target.keep(context, draft, round_)
        if step:
            assert scores is not None
            state = drafter.observe(context, state, draft, scores, round_)
    return TreeGroup(torch.stack(rewards, 1), torch.stack(lengths, 1))


def take_tokens(index: int, draft: Draft, tokens: Tensor) -> Round:  # (B,)
    """A round in which nothing is accepted, and these tokens follow."""
    rows, nothing = draft.batch, torch.zeros_like(tokens)
    return Round(
        index=index,
        drafted=(draft.nodes,) * rows,
        accepted=(0,) * rows,
        path=((),) * rows,
        takes_next=(True,) * rows,
        tokens=tuple((one,) for one in tokens.tolist()),
        finished=(False,) * rows,
        verdict=Verdict(nothing[:, None] - 1, nothing, tokens),
        read=((),) * rows,
        calls=int(index > 0),
    )


def standardise(gains: Tensor, real: Tensor) -> Tensor:  # (B, m) x2 -> (B, m)
    """Advantages: mean 0 and deviation 1 over the real entries of each row, 0 elsewhere."""
    number = real.sum(1, keepdim=True).clamp_min(1)
    centred = torch.where(real, gains - (gains * real).sum(1, keepdim=True) / number, 0.0)
    deviation = (centred.square().sum(1, keepdim=True) / number).sqrt()
    return centred / (deviation + _MIN_DEVIATION)


def path_likelihood(
    reader: Reader,
    head: StateHead,
    read: TargetOutputs,
    tokens: Tensor,
    start: int,
    lengths: Tensor,
) -> Tensor:  # (B, T), (B, m) -> (B, m)
    """Mean log q of the first `lengths` tokens after each prefix of a group; 0 for no token."""
    prompt, count = head_prompt(head, reader, read.prompt), lengths.shape[1]
    total = torch.zeros(lengths.shape, device=lengths.device)
    passes = int(lengths.max())
    if not passes:
        return total
    for late, own in enumerate(unroll_passes(head, prompt, tokens.shape[1], passes)):
        is_used = lengths > late
        first = start + 1 + late
        wanted = functional.pad(tokens, (0, passes))[:, first : first + count][is_used]
        logits = head.logits(own[:, start : start + count][is_used], reader.head)
        log_q = head.expand_logits(logits).float().log_softmax(-1).gather(-1, wanted[:, None])
        total = total.masked_scatter(is_used, total[is_used] + log_q[:, 0])
    return total / lengths.clamp_min(1)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's objective (Schulman et al. 2017), to be raised."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def group_loss(
    reader: Reader,
    pair: ReferencedHead,
    example: TrainingExample,
    group: int = 8,
    tree: DynamicTree = TREE,
    clip: float = 0.2,
    weight: float = 0.5,
) -> Tensor:  # ()
    """The head's usual loss, and `weight` times the clipped loss of a `group` of trees.

    The group begins at a random token. Raises ValueError for a cache: trees need the target.
    """
    if example.cache is not None:
        raise ValueError(
            "gto has the target read new trees in every step, which no cache holds; drop --cache"
        )
    head = pair.head
    usual = (
        eagle3_loss(reader, head, example, tree.depth)
        if isinstance(head, Eagle3Head)
        else aligned_loss(reader, head, example)
    )
    width = example.tokens.shape[1]
    count = min(group, width - 1)
    if not count:
        return usual
    start = int(torch.randint(width - count, ()))
    own, before = (
        grow_group(reader, one, example, start, count, tree) for one in (head, pair.reference)
    )
    real = example.tokens[:, start + 1 : start + 1 + count] >= 0
    advantage = standardise(own.rewards - before.rewards, real)
    return usual + weight * surrogate_loss(
        reader, pair, example, start, own.lengths, advantage, clip
    )


def surrogate_loss(
    reader: Reader,
    pair: ReferencedHead,
    example: TrainingExample,
    start: int,
    lengths: Tensor,
    advantage: Tensor,
    clip: float = 0.2,
) -> Tensor:  # (B, m), (B, m) -> ()
    """Minus the mean clipped surrogate over the prefixes at which something is accepted."""
    read = read_example(reader, example, *required_inputs(pair.head, reader))
    given = (read, example.tokens, start, lengths)
    own = path_likelihood(reader, pair.head, *given)
    with torch.no_grad():
        before = path_likelihood(reader, pair.reference, *given)
    found = clipped_surrogate((own - before).exp(), advantage, clip)
    is_used = lengths > 0
    return -(found * is_used).sum() / is_used.sum().clamp_min(1)


def check_pair(pair: ReferencedHead, reader: Reader) -> None:
    """Refuse a head of another target. Raises ValueError."""
    check_head(pair.head, reader)


def refuse_new_head(target: Reader, counts: Tensor, **changes: Any) -> NoReturn:
    """Raises ValueError: there is nothing to improve on."""
    raise ValueError(
        "gto trains a head further that was trained before; give --head the folder of a head of "
        "eagle-2 or eagle-3"
    )


@dataclass(frozen=True)
class GroupTraining(HeadTraining):
    """The training of a head beside a frozen copy."""

    def load(
        self, folder: Path, kinds: Sequence[DraftModelKind], target: Reader, **changes: Any
    ) -> nn.Module:
        """Load the head in a folder. Raises ValueError for other models and other targets."""
        if target.device.type == "meta":
            raise ValueError(
                "a plan has no figures for the trees that gto has the target read in every step; "
                "drop --dry-run, or plan the training of eagle-2 or eagle-3"
            )
        head: Any = HeadTraining(self.begin, self.loss, check_head).load(
            folder, kinds, target, **changes
        )
        return ReferencedHead(head)

    def stages(
        self, head: Any, steps: int, rate: float, muon: bool = False
    ) -> list[ScheduledOptimizer]:
        return super().stages(head.head, steps, rate, muon)

    def parts(self, head: Any) -> Mapping[str, Any]:
        """The head alone, as the draft model."""
        return {"drafter": head.head}


GTO = GroupTraining(refuse_new_head, group_loss, check_pair, rate=1e-5)
