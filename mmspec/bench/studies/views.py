"""Cost of drafting on a part of the target's cache as the visual context grows.

A text decoder reads random tokens, most of them image placeholders: views depend on which tokens
are visual, not on their content. In every round drafts with views of several sizes are made in
turns on one target, so that other load on the machine affects all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from mmspec.bench.reporting import (
    Progress,
    Report,
    describe_environment,
    dtype_name,
    read_clock,
    silent,
)
from mmspec.bench.studies.shapes import build_model, parse_device, random_prompt
from mmspec.decode import make_round
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Kind
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.kv import SparseKv
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain
from mmspec.errors import check_number
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.reader import Family
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Request
from mmspec.verifiers.coupled import Coupled

MARK = 3  # the image placeholder; random prompts have no token below 4
BEFORE, AFTER = 8, 24  # text tokens around the visual ones
VISUAL, TOKENS = (512, 1024, 2048, 4096, 8192), (64, 256)
MEGABYTE = 2**20


@dataclass(frozen=True)
class ViewPoint:
    """Medians per round of one visual context and one view; tokens=None reads the whole cache."""

    visual: int
    tokens: int | None
    draft_ms: float
    verify_ms: float  # of the target, which reads everything
    memory_mb: float  # of the keys and values read by the draft


@dataclass(frozen=True)
class Views(Report):
    """The report of `mmspec bench views`."""

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
    """Measure `rounds` rounds per context, with drafts of `length` tokens by every view in turns.

    Raises ValueError for counts out of range and unknown shapes.
    """
    for count in visual:
        check_number("visual", count, 1, 1 << 20, whole=True, example=512)
    for count in tokens:
        check_number("tokens", count, 0, whole=True, example=64)
    check_number("length", length, 1, 1024, whole=True, example=4)
    check_number("rounds", rounds, 1, 10_000, whole=True, example=8)
    place = parse_device(device)
    room = (rounds + 2) * (length + 1)
    positions = BEFORE + max(visual) + AFTER + room
    model = build_model(shape, place, torch.float32, positions, seed)
    model.config.image_token_id = MARK
    reader = Backbone(model, Family("shape", is_direct=True, placeholders=("image_token_id",)))
    points: list[ViewPoint] = []
    for at, count in enumerate(visual):
        points += _measure(reader, count, tokens, length, rounds, seed)
        progress("measure", at + 1, len(visual))
    where = {**describe_environment(place), "dtype": dtype_name(model.dtype)}
    return Views(shape, length, points, where)


def _measure(
    reader: Backbone, visual: int, tokens: Sequence[int], length: int, rounds: int, seed: int
) -> Iterator[ViewPoint]:
    place = reader.device
    target = CausalTarget(reader, frozenset({"head-attention"}), checks=False)
    room = (rounds + 2) * (length + 1)
    noise = KeyedNoise.from_seed(seed, 1, place)
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
    for index in range(rounds + 2):  # round 0 samples from the prefill, round 1 warms up
        context = context.at_round(index)
        scores, draft = context.scores, context.empty_draft()
        if scores is None:
            turn = index % len(drafters)
            for which in [*range(turn, len(drafters)), *range(turn)]:
                start = read_clock(place)
                draft = drafters[which].propose(context, states[which])
                spent[which].append(read_clock(place) - start)
            start = read_clock(place)
            scores = target.score(context, draft)
            verified.append(read_clock(place) - start)
        verdict = verifier.verify(draft, scores, context.noise)
        round_ = make_round(index, context, draft, scores, verdict, stop)
        context = target.keep(context, draft, round_)
    for size, state, times in zip(sizes, states, spent, strict=True):
        view = state.model
        size_mb = (memory if view is None else view.memory).cache.bytes() / MEGABYTE
        drafted, scored = (1e3 * median(part[1:]) for part in (times, verified))
        yield ViewPoint(visual, size, drafted, scored, size_mb)


def _prompt(reader: Backbone, visual: int, seed: int) -> dict[str, Any]:
    length = BEFORE + visual + AFTER
    inputs = random_prompt(reader.vocabulary, length, reader.device, seed=seed)
    inputs["input_ids"][:, BEFORE : BEFORE + visual] = MARK
    return inputs
