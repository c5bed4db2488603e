"""Train a judge: which of the drafted tokens that the target refuses would do no harm.

bind = lambda verifier: mmspec.accelerate(
    model, "speculative-sampling", drafter=drafter, verifier=verifier
)
train_judge(bind, requests, same_end(4)).head.save("judge.safetensors")
mmspec.accelerate(model, "judge", drafter=drafter, judge="judge.safetensors")

The search of AutoJudge (Garipov et al. 2025): decode greedily, put a refused token back, let the
target continue, and compare the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec import _hf
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.errors import check_number
from mmspec.targets.tokens.context import append_tokens
from mmspec.verifiers.judge import JudgeHead
from mmspec.verifiers.recursive import Recursive

RECALL = 0.9  # share of harmful tokens that stay refused, on held-out ones (AutoJudge)
HELD_OUT = 5  # every fifth token is held out
Answers = Callable[[Sequence[int], Sequence[int]], bool]


@dataclass(frozen=True)
class Refusal:
    """A drafted token that the target refused."""

    place: int  # new tokens before it
    token: int
    state: Tensor  # (H,) of the target at the token


@dataclass(eq=False)
class RefusalRecorder(Verifier):
    """Speculative sampling of one row, which notes the first refused token of each round."""

    found: list[Refusal] = field(default_factory=list)
    place: int = 0

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.WOR, Kind.IID, Kind.DET)
    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    required_features: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def bind_context(self, context: Any) -> Verifier:
        self.place = context.num_generated(0)
        return self

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        verdict = Recursive().verify(draft, scores, noise)
        kept = int(verdict.length[0])
        if kept < draft.nodes and bool(draft.mask[0, kept]):
            state = scores.features["hidden"][0, kept + 1].float().cpu()
            self.found.append(Refusal(self.place + kept, int(draft.tokens[0, kept]), state))
        return verdict


def same_end(count: int) -> Answers:
    """Answers are the same if their last `count` tokens are; 0 = if all are."""
    check_number("count", count, 0, whole=True, example=4)
    return lambda one, other: list(one[-count:]) == list(other[-count:])


@dataclass(frozen=True)
class TrainedJudge:
    """A judge, and what it was trained on."""

    head: JudgeHead
    num_tokens: int  # refused ones
    harmless: float  # share of them
    recall: float  # of harmful held-out tokens, at the head's threshold
    saved: float  # share of harmless held-out tokens that it accepts


def train_judge(
    bind: Callable[[Verifier], Any],
    requests: Sequence[Mapping[str, Any]],
    is_same: Answers,
    max_new_tokens: int = 128,
    steps: int = 300,
    rate: float = 1e-2,
) -> TrainedJudge:
    """Train a judge on the refusals of greedy runs.

    `bind` accelerates a model and a draft model with a verifier, `requests` are arguments of its
    `generate`, one row each and without settings. `is_same(new, old)` compares two answers, as new
    tokens. Raises ValueError where no refused token is harmless, or every one.
    """
    recorder = RefusalRecorder()
    fast = bind(recorder)
    states, labels = list[Tensor](), list[bool]()
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens}
    for request in requests:
        recorder.found.clear()
        answer = _answer(fast, request, settings)
        for one in list(recorder.found):
            if one.place < len(answer):
                states.append(one.state)
                labels.append(is_same(_continue_from(fast, request, answer, one, settings), answer))
    if len(set(labels)) < 2:
        kind = "harmless" if labels and labels[0] else "harmful"
        raise ValueError(
            f"all {len(labels)} refused tokens are {kind}, so there is nothing to tell apart; give "
            "more requests, or another comparison of answers"
        )
    return fit_judge(torch.stack(states), torch.tensor(labels), steps, rate)


def _answer(fast: Any, request: Mapping[str, Any], settings: Mapping[str, Any]) -> list[int]:
    """The new tokens of one row."""
    out = fast.generate(**{**request, **settings})
    start = 0 if request.get("input_ids") is None else request["input_ids"].shape[1]
    found: list[int] = out.sequences[0, start:].tolist()
    return found


def _continue_from(
    fast: Any,
    request: Mapping[str, Any],
    answer: Sequence[int],
    refusal: Refusal,
    settings: Mapping[str, Any],
) -> list[int]:
    """The answer with a refused token put back; an end-of-sequence token ends it."""
    before = [*answer[: refusal.place], refusal.token]
    left = settings["max_new_tokens"] - len(before)
    if left < 1 or refusal.token in _hf.eos_ids(fast.model.generation_config):
        return before
    reader = fast.session.bound.backbone
    ids = torch.tensor([before], device=reader.device)
    longer = append_tokens(reader, request, ids)
    return before + _answer(fast, longer, {**settings, "max_new_tokens": left})


def fit_judge(
    states: Tensor, labels: Tensor, steps: int = 300, rate: float = 1e-2
) -> TrainedJudge:  # (n, H), (n,) bool: harmless
    """Fit a judge; its threshold keeps nine of ten harmful held-out tokens refused."""
    head = JudgeHead(states.shape[1])
    torch.nn.init.zeros_(head.linear.weight)
    torch.nn.init.zeros_(head.linear.bias)
    places = torch.arange(len(labels))
    held = places % HELD_OUT == 0
    train = ~held if len(set(labels[~held].tolist())) == 2 else torch.ones_like(held)
    balance = (~labels[train]).sum() / labels[train].sum()
    optimizer = torch.optim.AdamW(head.parameters(), rate, weight_decay=1e-2)
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            logits = functional.linear(states[train], head.linear.weight, head.linear.bias)[:, 0]
            loss = functional.binary_cross_entropy_with_logits(
                logits, labels[train].float(), pos_weight=balance
            )
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        chances = head(states)
    tested = held if bool((~labels[held]).any()) else torch.ones_like(held)
    harmful, harmless = chances[tested & ~labels], chances[tested & labels]
    ranked = harmful.sort().values
    head.threshold = float(ranked[math.ceil(RECALL * len(ranked)) - 1])
    saved = (harmless > head.threshold).float().mean() if len(harmless) else torch.zeros(())
    recall = (harmful <= head.threshold).float().mean()
    share = labels.float().mean()
    return TrainedJudge(head.eval(), len(labels), float(share), float(recall), float(saved))
