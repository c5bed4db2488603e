"""What a draft on part of the target's memory costs as visual contexts grow.

A text decoder of a shape reads random tokens, most of them placeholders: what a view does depends
on which tokens are visual and not on what they show. Drafts with views of several sizes are made in
turns in every round, on one target, so that other work on the machine hits all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from mmspec.bench.environment import dtype_name, environment, seconds
from mmspec.bench.progress import Progress, silent
from mmspec.bench.report import Report
from mmspec.bench.studies.shapes import build
from mmspec.bench.workload import random_prompt
from mmspec.decode import settle
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Kind
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.kv import SparseKv
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.errors import check_number
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.family import Family
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Request
from mmspec.verifiers.coupled import Coupled

MARK = 3  # the token that counts as visual; random prompts have none below 4
BEFORE, BEHIND = 8, 24  # words around them
VISUAL, TOKENS = (512, 1024, 2048, 4096, 8192), (64, 256)
MEGABYTE = 2**20


@dataclass(frozen=True)
class ViewPoint:
    """Medians per round of one visual context and one view; tokens=None reads all of the memory."""

    visual: int
    tokens: int | None
    draft_ms: float
    verify_ms: float  # of the target, which reads everything
    memory_mb: float  # of keys and values that the draft reads


@dataclass(frozen=True)
class Views(Report):
    """What `mmspec bench views` reports."""

    shape: str
    length: int
    points: list[ViewPoint]
    environment: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def views(
    shape: str = "small",
    *,
    visual: Sequence[int] = VISUAL,
    tokens: Sequence[int] = TOKENS,
    length: int = 4,
    rounds: int = 8,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = silent,
) -> Views:
    """Measure `rounds` rounds per context, drafts of `length` tokens by every view in turns.

    Raises ValueError for numbers that are none and shapes that are not known.
    """
    for count in visual:
        check_number("visual", count, 1, whole=True, example=512)
    for count in tokens:
        check_number("tokens", count, 0, whole=True, example=64)
    place = torch.device(device)
    room = (rounds + 2) * (length + 1)
    positions = BEFORE + max(visual) + BEHIND + room
    model = build(shape, place, torch.float32, positions, seed)
    model.config.image_token_id = MARK
    reader = Backbone(model, Family("shape", direct=True, placeholders=("image_token_id",)))
    points: list[ViewPoint] = []
    for at, count in enumerate(visual):
        points += _measured(reader, count, tokens, length, rounds, seed)
        progress("measure", at + 1, len(visual))
    where = {**environment(place), "dtype": dtype_name(model.dtype)}
    return Views(shape, length, points, where)


def _measured(
    reader: Backbone, visual: int, tokens: Sequence[int], length: int, rounds: int, seed: int
) -> Iterator[ViewPoint]:
    place = reader.device
    target = CausalTarget(reader, frozenset({"head-attention"}), checks=False)
    room = (rounds + 2) * (length + 1)
    noise = KeyedNoise.seeded(seed, 1, place)
    context = target.prefill(Request(_prompt(reader, visual, seed), Sampling(), noise, room))
    memory: Any = context.memory
    sizes: list[int | None] = [*tokens, None]
    drafters = [
        Autoregressive(
            SharedBackbone(reader, kv=SparseKv(visual if size is None else size)),
            Chain(Fixed(length), (Kind.DET,)),
        )
        for size in sizes
    ]
    states = [drafter.begin(context) for drafter in drafters]
    spent: list[list[float]] = [[] for _ in drafters]
    verified: list[float] = []
    verifier, stop = Coupled(), Stop(room)
    for index in range(rounds + 2):  # the first reads a token off the prefill, the second warms up
        context = context.at_round(index)
        scores, draft = context.scores, context.nothing()
        if scores is None:
            turn = index % len(drafters)
            for which in [*range(turn, len(drafters)), *range(turn)]:
                start = seconds(place)
                draft = drafters[which].propose(context, states[which])
                spent[which].append(seconds(place) - start)
            start = seconds(place)
            scores = target.score(context, draft)
            verified.append(seconds(place) - start)
        verdict = verifier.verify(draft, scores, context.noise)
        kept = settle(index, context, draft, scores, verdict, stop)
        context = target.keep(context, draft, kept)
    for size, state, times in zip(sizes, states, spent, strict=True):
        view = state.model
        held = (memory if view is None else view.memory).cache.bytes() / MEGABYTE
        drafted, scored = (1e3 * median(part[1:]) for part in (times, verified))
        yield ViewPoint(visual, size, drafted, scored, held)


def _prompt(reader: Backbone, visual: int, seed: int) -> dict[str, Any]:
    length = BEFORE + visual + BEHIND
    made = random_prompt(reader.vocabulary, length, reader.device, seed=seed)
    made["input_ids"][:, BEFORE : BEFORE + visual] = MARK
    return made
