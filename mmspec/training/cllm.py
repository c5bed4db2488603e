"""Consistency training: a target that Jacobi iteration decodes in fewer steps (CLLM).

    answers = record_trajectories(model, requests, block=16, max_new_tokens=128)
    train_consistency(model, answers, steps=500)
    model.save_pretrained(folder)
    mmspec.accelerate(folder, "cllm")

Kou et al. 2024, "CLLMs: consistency large language models". Jacobi iteration replaces all tokens of
a block at once by the model's greedy choice after the tokens of the last iteration, from random
ones to a fixed point, which is the greedy answer. The model is trained to predict from every state
what it predicts from the fixed point (the global consistency loss), and to keep its answers (cross
entropy, with ten times the weight, as in the authors' code). The result is another model: decoding
it is exact to its own outputs, not to those of the model before. Reconstructed: blocks are those of
the whole answer, whose later blocks begin after the answer so far; the first state is uniform over
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.errors import check_number
from mmspec.targets.tokens.context import append_tokens
from mmspec.training.fitting import CosineDecay, TrainingRun, fit

ANSWER_WEIGHT = 10.0  # of the cross entropy


@dataclass(frozen=True)
class Trajectory:
    """The states of a Jacobi iteration over a block of an answer."""

    inputs: Mapping[str, Any]  # one row: the request, and the answer before the block
    states: Tensor  # (J + 1, n) int64, from random tokens to the fixed point


@dataclass(frozen=True)
class ConsistencyTraining:
    """What a training did."""

    losses: list[float]  # of every step


def block_logits(model: Any, inputs: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Logits (1, n, V) of tokens (1, n) after a request: row i is after i of them."""
    out = model(**append_tokens(None, inputs, tokens), use_cache=False, return_dict=True)
    logits: Tensor = out.logits[:, -tokens.shape[1] - 1 : -1]
    return logits.float()


@torch.no_grad()
def record_trajectories(
    model: Any,
    requests: Sequence[Mapping[str, Any]],
    block: int = 16,
    max_new_tokens: int = 128,
    repeats: int = 4,
    never: Sequence[int] = (),
    seed: int = 0,
) -> list[Trajectory]:
    """Answer requests of one row greedily, and iterate every block of the answers.

    A block is iterated from `repeats` random states. Of a request its tensors are read; settings of
    sampling are not.
    `never` are ids that no state has, such as placeholders of images. Blocks whose iteration ends
    elsewhere than decoding one by one, by rounding, are left out. Raises ValueError where none is
    left, and for requests of several rows.
    """
    check_number("block", block, 2, whole=True, example=16)
    noise, found = torch.Generator().manual_seed(seed), list[Trajectory]()
    for given in requests:
        request = {name: one for name, one in given.items() if isinstance(one, Tensor)}
        ids = request["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"a request has {len(ids)} rows; give requests of one row each")
        out = model.generate(**request, do_sample=False, max_new_tokens=max_new_tokens)
        answer = out[:, ids.shape[1] :]
        for start in range(0, answer.shape[1], block):
            inputs = append_tokens(None, request, answer[:, :start]) if start else request
            wanted = answer[:, start : start + block]
            for _ in range(repeats):
                states = iterate(model, inputs, wanted.shape[1], never, noise)
                if torch.equal(states[-1:], wanted) and len(states) > 1:
                    found.append(Trajectory(inputs, states))
    if not found:
        raise ValueError(
            f"no block of the answers to {len(requests)} requests can be trained on; give other "
            "prompts, or more new tokens"
        )
    return found


@torch.no_grad()
def iterate(
    model: Any,
    inputs: Mapping[str, Any],
    size: int,
    never: Sequence[int] = (),
    noise: torch.Generator | None = None,
) -> Tensor:  # (J + 1, size)
    """The states of Jacobi iteration, up to the fixed point, at most `size` iterations."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    weights = torch.ones(vocabulary)
    weights[list(never)] = 0
    first = torch.multinomial(weights, size, replacement=True, generator=noise)
    states = [first[None].to(inputs["input_ids"].device)]
    for _ in range(size):
        logits = block_logits(model, inputs, states[-1])
        logits[..., list(never)] = -torch.inf
        new = logits.argmax(-1)
        if torch.equal(new, states[-1]):
            break
        states.append(new)
    return torch.cat(states)


def consistency_loss(
    model: Any, example: Trajectory, state: int, answer_weight: float = ANSWER_WEIGHT
) -> Tensor:  # ()
    """KL of predictions after a state from those after the fixed point, and cross entropy.

    The predictions after the fixed point carry no gradient in the first term, which counts the
    tokens after the first that differs: those before it have the same prefix.
    """
    fixed, now = example.states[-1:], example.states[state : state + 1]
    wanted = block_logits(model, example.inputs, fixed)
    answer = functional.cross_entropy(wanted[0], fixed[0])
    later = (now != fixed).cumsum(-1)[:, :-1] > 0  # of tokens 1, 2, ...: their prefix differs
    if not bool(later.any()):
        return answer_weight * answer
    found = block_logits(model, example.inputs, now)[:, 1:][later].log_softmax(-1)
    target = wanted[:, 1:][later].detach().log_softmax(-1)
    consistency = functional.kl_div(found, target, reduction="batchmean", log_target=True)
    return consistency + answer_weight * answer


def train_consistency(
    model: Any,
    examples: Sequence[Trajectory],
    steps: int = 500,
    rate: float = 2e-5,
    answer_weight: float = ANSWER_WEIGHT,
    run: TrainingRun | None = None,
) -> ConsistencyTraining:
    """Train a model in place on one random state of one trajectory per step.

    Raises ValueError for weights of less than 32 bits.
    """
    check_number("steps", steps, 1, whole=True, example=500)
    run = run or TrainingRun()
    weights = [*model.parameters()]
    if any(one.dtype != torch.float32 for one in weights):
        raise ValueError(
            f"weights of {model.dtype} cannot be trained here; load the model in float32"
        )
    before = [one.requires_grad for one in weights]
    noise, losses = torch.Generator().manual_seed(run.seed), list[float]()

    def pick() -> tuple[Trajectory, int]:
        example = examples[int(torch.randint(len(examples), (), generator=noise))]
        return example, int(torch.randint(len(example.states) - 1, (), generator=noise))

    def loss_of(item: tuple[Trajectory, int]) -> Tensor:
        loss = consistency_loss(model, *item, answer_weight)
        losses.append(float(loss.detach()))
        return loss

    for one in weights:
        one.requires_grad_(True)
    try:
        with torch.enable_grad():
            items = iter(pick, None)
            fit(weights, items, loss_of, CosineDecay(steps, rate), "consistency", run)
    finally:
        for one, value in zip(weights, before, strict=True):
            one.requires_grad_(value)
            one.grad = None
    return ConsistencyTraining(losses)
