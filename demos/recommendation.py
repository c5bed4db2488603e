"""Recommend items with a generative list model: exact lists by beams, sessions from known ones.

    python demos/recommendation.py             # trains both models in under a minute
    python demos/recommendation.py --steps 50  # a quick look, with poor lists

An item is a semantic id of four tokens, a user's history is a text of items after the token of the
user's group, and a model of these texts recommends. Two figures:

- Lists: the best N items are N beams of four tokens (AtSpeed-S, Lin et al. 2025). The lists are
  those of `generate(num_beams=N)`, checked here; the draft model saves calls of the target.
- Sessions: the next items of a user, greedy, drafted from sessions of other users (DARE, Xi et al.
  2024), of all groups or of the user's own. Exact; with `RankLimit` a drafted token may also be one
  of the best k of the target (the paper's relaxed verification), which is lossy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import mmspec
from mmspec.bench.forwards import time_forwards
from mmspec.cli.output import silence_libraries
from mmspec.drafters.lookup.datastore import Datastore
from mmspec.models.loading import random_model
from mmspec.training.fitting import CosineDecay, TrainingRun, fit, split_parameters
from mmspec.verifiers.rank_limit import RankLimit
from mmspec.verifiers.recursive import Recursive

console = Console(highlight=False)
LEVELS, CODES, ITEMS, GROUPS = 4, 8, 128, 4  # tokens of an item, their values; users' groups
FIRST_CODE = 1 + GROUPS  # token 0 pads
VOCABULARY = FIRST_CODE + LEVELS * CODES
FOLLOWING = np.array([0.6, 0.25, 0.1, 0.05])  # rates of the items that follow one
HISTORY, SESSION = 8, 4  # items
KNOWN = 100  # users of each group whose sessions are known
LISTS = (3, 5, 10, 20)


@dataclass(frozen=True)
class Shop:
    """Items, and what the users of each group choose after each."""

    codes: Tensor  # (ITEMS, LEVELS) token ids
    following: np.ndarray  # (GROUPS, ITEMS, len(FOLLOWING)) items

    @classmethod
    def of(cls, seed: int) -> Shop:
        """A shop of random items, all with different codes."""
        generator = np.random.default_rng(seed)
        numbers = generator.choice(CODES**LEVELS, ITEMS, replace=False)
        levels = [FIRST_CODE + at * CODES + numbers // CODES**at % CODES for at in range(LEVELS)]
        ways = [
            [generator.choice(ITEMS, len(FOLLOWING), replace=False) for _ in range(ITEMS)]
            for _ in range(GROUPS)
        ]
        return cls(torch.tensor(np.stack(levels, 1)), np.array(ways))

    def histories(self, groups: Sequence[int], items: int, seed: int) -> Tensor:  # (B, 1 + 4 n)
        """A history of `items` per user of a group."""
        generator, users = np.random.default_rng((seed, 1)), len(groups)
        ranks = generator.choice(len(FOLLOWING), (items, users), p=FOLLOWING)
        chosen = [generator.integers(ITEMS, size=users)]
        for rank in ranks[1:]:
            chosen.append(self.following[groups, chosen[-1], rank])
        codes = self.codes[torch.tensor(np.stack(chosen, 1))].flatten(1)
        return torch.cat((1 + torch.tensor(groups)[:, None], codes), 1)

    def allowed(self, row: int, ids: Tensor) -> list[int]:
        """The tokens that go on to an item of the shop, for `prefix_allowed_tokens_fn`."""
        begun = ids[len(ids) - (len(ids) - 1) % LEVELS :]
        fits = (self.codes[:, : len(begun)] == begun).all(1)
        found: list[int] = self.codes[fits, len(begun)].unique().tolist()
        return found


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the target.")] = 400,
    users: Annotated[int, typer.Option(min=1, help="Users to recommend to.")] = 12,
    seed: int = 0,
) -> None:
    """Train a list model and its draft model; print the figures of lists and of sessions."""
    silence_libraries()
    torch.set_num_threads(1)
    shop = Shop.of(seed)
    target = train(make_model(3, 64, seed), shop, steps, seed)
    small = train(make_model(1, 64, seed + 1), shop, steps, seed)
    groups = [user % GROUPS for user in range(users)]
    known = shop.histories(groups, HISTORY + 1, seed + 2)
    requests, chosen = known[:, :-LEVELS], known[:, -LEVELS:]
    table = Table("list of", "calls, generate()", "calls, AtSpeed-S", "has the choice", box=None)
    for size in LISTS:
        plain, fast, lists = compare_lists(target, small, shop, requests, size)
        hits = (lists == chosen[:, None]).all(-1).any(-1)
        table.add_row(f"{size}", f"{plain}", f"{fast}", f"{int(hits.sum())} of {users}")
    console.print(table)
    table = Table("session drafted from", "tokens per call", "tokens of the target", box=None)
    for row in compare_sessions(target, shop, requests, groups, seed + 3):
        table.add_row(row.name, f"{row.tokens / row.calls:.2f}", f"{row.same / row.tokens:.0%}")
    console.print(table)


def make_model(layers: int, width: int, seed: int) -> Any:
    """A Llama of items, with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return random_model(lambda: LlamaForCausalLM(config), seed)


def train(model: Any, shop: Shop, steps: int, seed: int, batch: int = 24) -> Any:
    """Train on histories of random users."""

    def batches() -> Iterator[Tensor]:
        for number in range(steps):
            groups = np.random.default_rng((seed, number)).integers(GROUPS, size=batch)
            yield shop.histories(groups.tolist(), HISTORY + SESSION, 1000 + number)

    def loss_of(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    model.train().requires_grad_(True)
    matrices, others = split_parameters(model.model.layers, model.parameters())
    decay, run = CosineDecay(steps, 3e-3), TrainingRun(seed)
    fit(others, batches(), loss_of, decay, "list model", run, matrices)
    return model.eval().requires_grad_(False)


def compare_lists(
    target: Any, small: Any, shop: Shop, requests: Tensor, size: int
) -> tuple[int, int, Tensor]:
    """Calls of the target by `generate()` and by AtSpeed-S, and the lists (B, size, LEVELS).

    Raises ValueError if one list differs.
    """
    settings: dict[str, Any] = {
        "max_new_tokens": LEVELS,
        "num_beams": size,
        "num_return_sequences": size,
        "prefix_allowed_tokens_fn": shop.allowed,
        "do_sample": False,
    }
    fast = mmspec.accelerate(target, "coupled", drafter=small, length=LEVELS - 1)
    calls, lists = [0, 0], []
    for request in requests:
        given = _request(request)
        with time_forwards(target.model, request.device) as forwards:
            wanted = target.generate(**given, **settings)
        calls[0] += len(forwards)
        out = fast.generate(**given, **settings)
        calls[1] += 1 + out.stats.target_calls  # the prompt
        if not torch.equal(out.sequences, wanted):
            raise ValueError(f"the list of {size} items is not that of generate()")
        lists.append(out.sequences[:, -LEVELS:])
    return calls[0], calls[1], torch.stack(lists)


@dataclass
class Sessions:
    """How sessions of all users were decoded."""

    name: str
    tokens: int = 0
    calls: int = 0  # of the target, without those that read prompts
    same: int = 0  # tokens equal to those of plain decoding


def compare_sessions(
    target: Any, shop: Shop, requests: Tensor, groups: Sequence[int], seed: int
) -> list[Sessions]:
    """Sessions of `SESSION` items, drafted in four ways."""
    others = [group for group in range(GROUPS) for _ in range(KNOWN)]
    known = shop.histories(others, HISTORY, seed)[:, 1:].tolist()
    pools = [Datastore.of(known)]
    pools += [Datastore.of(known[group * KNOWN :][:KNOWN]) for group in range(GROUPS)]
    relaxed = {"verifier": Recursive(RankLimit(2))}
    ways: list[tuple[str, str, bool, dict[str, Any]]] = [
        ("the user's own history", "prompt-lookup", False, {}),
        ("all users", "rest", False, {}),
        ("the user's group", "rest", True, {}),
        ("the user's group, relaxed", "rest", True, relaxed),
    ]
    plain = mmspec.accelerate(target, "plain")
    settings = {"max_new_tokens": SESSION * LEVELS, "do_sample": False}
    found = []
    for name, recipe, is_own, parts in ways:
        row = Sessions(name)
        for request, group in zip(requests, groups, strict=True):
            own: dict[str, Any] = {}
            if recipe == "rest":
                own["datastore"] = pools[1 + group if is_own else 0]
            out = mmspec.accelerate(target, recipe, **own, **parts).generate(
                **_request(request), **settings
            )
            wanted = plain.generate(**_request(request), **settings).sequences
            row.tokens += SESSION * LEVELS
            row.calls += out.stats.target_calls
            row.same += int((out.sequences == wanted)[:, len(request) :].sum())
        found.append(row)
    return found


def _request(history: Tensor) -> dict[str, Tensor]:  # (L,) -> (1, L)
    return {"input_ids": history[None], "attention_mask": torch.ones_like(history[None])}


if __name__ == "__main__":
    typer.run(main)
