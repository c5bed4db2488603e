"""Benchmark and certification of image-token models: requests, baselines and quality scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec import recipes
from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench import checks
from mmspec.bench import constant_drafter as constant
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.reporting import describe_device
from mmspec.bench.workload import repeat_prompts
from mmspec.codes.image_family import to_images
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Kind
from mmspec.drafters.plain import NoDraft
from mmspec.modalities.common import measures
from mmspec.modalities.image import tiny_models
from mmspec.modalities.image.generation import ImageRequest, Images, cell_offsets
from mmspec.modality import Quality, Runner, RunResult, RunResults, Selection, Speculative, Workload
from mmspec.recipe import Recipe
from mmspec.targets.memory import build_block
from mmspec.zoo.scene import BOARD, Scene
from mmspec.zoo.scene_tensors import encode_board

OWN = "generate"
REPLAYED = 2  # requests whose forwards are timed again on their own
SCORING_BATCH = 16  # images per call that are scored but not timed
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Held-out prompts and image scores for bundled models; the user's prompts otherwise."""
    batch, seed = selection.batch, selection.seed
    processor = formatter.processor
    if selection.prompts is not None or not formatter.source.startswith("zoo:"):
        timed = [
            formatter.request(group) for group in repeat_prompts(selection.prompts or ["0"], batch)
        ]
        return of_requests(model, timed, batch=batch, processor=processor)
    groups, shown = measures.held_out_prompts(selection.count, batch, seed)
    judged: list[Request] = []
    if settings.pictures:
        together = min(SCORING_BATCH, settings.pictures)
        many, shown = measures.held_out_prompts(settings.pictures, together, seed + 1)
        judged = [formatter.request(group) for group in many]
    timed = [formatter.request(group) for group in groups]
    qualities = (
        measures.facts_quality(partial(measures.score_images, shown)),
        ink_per_round(shown),
    )
    return of_requests(model, timed, judged, qualities, batch, processor)


def of_requests(
    model: Any,
    timed: Sequence[Request],
    judged: Sequence[Request] = (),
    qualities: Sequence[Quality] = (),
    batch: int = 1,
    processor: Any = None,
) -> Workload:
    """Workload of requests, arguments of `generate_images`; log likelihood is always scored."""
    plain = accelerate(model, "plain", processor=processor)
    family = plain.session.image_family
    own: dict[str, Runner] = {} if family.native_generate is None else {OWN: ModelGeneration(plain)}
    why = f"{family.name} has no image generation loop of its own"
    options = {name: value for name, value in timed[0].items() if _is_setting(name, family.inputs)}
    codes = plain.session.prepare_request(**timed[0]).grid.cells
    return Workload(
        timed=timed,
        plain=SpeculativeGeneration(plain),
        fast=SpeculativeGeneration,
        baselines=own,
        missing={} if own else {OWN: why},
        controls=partial(constant.make_controls, model, processor=processor),
        judged=judged,
        qualities=(*qualities, likelihood(plain, judged or timed)),
        batch=batch,
        is_greedy=options.get("temperature", 0.0) == 0,
        replayed=REPLAYED,
        tiny_model_distance=toy_distance,
        settings={**options, "codes": codes},
        **describe_device(model),
    )


class SpeculativeGeneration(Speculative):
    """The speculative loop with a recipe."""

    def run(self, request: Request, seed: int) -> RunResult:
        out: Images = self.fast.generate_images(**request, seed=seed)
        tokens, stats = out.sequences.tolist(), out.stats
        count = sum(map(len, tokens))
        calls, exact = stats.target_calls, stats.exact
        return RunResult(tokens, count, calls, exact, out.images, stats, rounds=out.rounds)


@dataclass(frozen=True)
class ModelGeneration(Runner):
    """The model's own generation loop, if it has one."""

    plain: Accelerated

    def run(self, request: Request, seed: int) -> RunResult:
        prepared: ImageRequest = self.plain.session.prepare_request(**request)
        assert prepared.image_family.native_generate is not None
        torch.manual_seed(seed)
        sequences = prepared.image_family.native_generate(prepared.inputs, prepared.sampling)
        codes = prepared.image_family.codebook.codes[prepared.gather_cells(sequences)]
        tokens = sequences.tolist()
        images = to_images(prepared.image_family.decode(codes))
        return RunResult(tokens, sum(map(len, tokens)), len(tokens[0]) - 1, output=images)


def likelihood(plain: Accelerated, requests: Sequence[Request]) -> Quality:
    """Log likelihood of the images per code, under the target."""

    def values(answers: Sequence[RunResult], others: RunResults) -> list[tuple[float, float]]:
        found: list[float] = []
        for request, answer in zip(requests, answers, strict=True):
            prepared = plain.session.prepare_request(**request)
            sequences = torch.tensor(answer.values, device=plain.model.device)
            found += log_likelihood(plain, prepared, sequences).tolist()
        return [(one, 1.0) for one in found]

    return Quality("log likelihood", values)


@torch.no_grad()
def log_likelihood(fast: Accelerated, request: ImageRequest, sequences: Tensor) -> Tensor:
    """Mean log-probability (B,) per code of images (B, L) under the target, in one forward.

    Uses the guided distributions at the request's temperature, before top-k and other filters, so
    that images of lossy recipes have nonzero probability. The mean over images sampled from the
    target is minus its mean entropy per code.
    """
    length = sequences.shape[1]
    memory, first, _ = fast.session.bound.backbone.prefill(request.inputs, extra_slots=length + 64)
    logits = first[:, None]
    if length > 1:
        draft = Draft.chain(sequences[:, 1:-1], Kind.DET)
        layout = build_block(sequences[:, :1].tolist(), draft, memory.like)
        logits = torch.cat((logits, fast.session.bound.backbone.read(memory, layout)[0]), 1)
    places = request.sampling.position_processors
    start = request.inputs["attention_mask"].sum(-1, keepdim=True)
    position = start + torch.arange(length, device=start.device)
    sampling = Sampling(True, request.sampling.temperature, position_processors=places)
    log_probs: Tensor = sampling.distribution(logits, None, position).log_prob(sequences)  # (B, L)
    return log_probs[:, cell_offsets(request.grid, log_probs.device).flatten()].mean(-1)


def ink_per_round(scenes: Sequence[Scene]) -> Quality:
    """Object codes per round that accepted any, on images of scenes; weighted by such rounds.

    Background codes are easy to predict, so a recipe may save calls on them alone. Plain decoding
    scores 1, in any order of the codes.
    """

    def values(answers: Sequence[RunResult], others: RunResults) -> list[tuple[float, float]]:
        if any(answer.rounds is None for answer in answers):
            return []
        rounds = [one for answer in answers for one in answer.rounds]
        return [_count_ink(scene, one) for scene, one in zip(scenes, rounds, strict=True)]

    return Quality("ink per round", values)


def has_ink(scene: Scene, height: int, width: int) -> Tensor:  # -> (H, W) bool
    """Whether each code of an image lies in a board cell that holds an object."""
    is_occupied = (encode_board(scene)[:, 0] > 0).view(BOARD, BOARD)
    row, column = (torch.arange(size) * BOARD // size for size in (height, width))
    return is_occupied[row[:, None], column]


def _count_ink(scene: Scene, rounds: Tensor) -> tuple[float, float]:
    height, width = rounds.shape
    accepted = rounds.cpu()[has_ink(scene, height, width)]
    count = len(accepted.unique())
    return len(accepted) / max(count, 1), float(count)


def toy_distance(recipe: str, parts: Mapping[str, Any]) -> float | None:
    """The enumerated distance of a recipe with other parts, on an image of four codes."""
    return tiny_models.distance(tiny_models.tiny_pair(recipes.get(recipe), 0, **parts).recipe)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Test distributions on tiny models, and equality on the user's model if there is one.

    Raises ValueError for a recipe that cannot be bound to a tiny model.
    """
    small = tiny_models.tiny_pair(recipe, 0)
    fast = trial.fast or small
    return fast.recipe, _checks(fast, small, recipe, trial)


def _checks(fast: Accelerated, small: Accelerated, recipe: Recipe, trial: Trial) -> Iterator[Check]:
    plan = fast.recipe
    yield checks.enumeration(plan, small.recipe.verifier, tiny_models.CODES)
    small_pair, subject = tiny_models.tiny_pair, tiny_models.generation_subject
    yield checks.frequency(plan, lambda seed: subject(small_pair(recipe, seed)), trial, "codes")
    mine, model = SpeculativeGeneration(fast), fast.model
    other = accelerate(model, "plain", processor=fast.session.processor)
    is_plain = isinstance(fast.session.bound.drafter, NoDraft)
    plain = None if is_plain else SpeculativeGeneration(other)
    reference: Runner | None = plain
    label = "plain decoding"
    if trial.fast is None:
        reference, label = tiny_models.UncachedGreedy(model), "distributions computed from scratch"
    elif fast.session.image_family.native_generate is not None:
        reference, label = ModelGeneration(other), "generate()"
    requests = trial.requests or [{**tiny_models.class_request(1), **tiny_models.SETTINGS}]
    greedy = [{**one, "temperature": 0.0} for one in requests]
    yield checks.greedy_equality(plan, reference, mine, greedy, trial, label)
    sampled = [{"temperature": 1.0, **one} for one in requests]
    yield checks.seeded_equality(plan, plain, mine, sampled, trial)


def _is_setting(name: str, inputs: Sequence[str]) -> bool:
    """Whether an argument is a sampling setting, not a prompt."""
    return name not in (*inputs, "prompt", "negative")
