"""Train the bundled language checkpoints from a seed, in minutes on two CPU cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from mmspec.modalities.common.formatting import get_tokenizer
from mmspec.modalities.vlm.checkpoints import load
from mmspec.modality import Entry
from mmspec.training.fitting import CosineDecay, TrainingProgress, TrainingRun
from mmspec.zoo.catalogue import info
from mmspec.zoo.language import ExampleKind, examples
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.vlm.architecture import (
    BLIND,
    LLAVA_TARGET,
    QWEN_TARGET,
    SIGHTED,
    LanguageShape,
)
from tools.zoo.vlm.batches import (
    Batch,
    Encoder,
    Renderer,
    iterate_samples,
    render_any_style,
    render_drawing,
    render_plain,
    render_textured,
)
from tools.zoo.vlm.distillation import iterate_batches, sample_target_responses
from tools.zoo.vlm.evaluate import acceptance, facts_right, sample_drawings
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.training import distil_vision, train_on_responses, train_vision
from tools.zoo.vlm.vision_training import train_vision_invariance

ABOUT = """\
Knows only the Scene world of the `mmspec` zoo: coloured shapes and written digits on a board of
nine places, one image and one question at a time.

A target is trained on random scenes, first to name the thing in each cell, then to answer; then
its vision part is trained to give the text model the same features for textured images and for
flat drawings as for plain images. A drafter is trained on its target's answers about training
scenes, one that reads images on scenes of all these styles.
"""
NOTES = """\
`facts` is the share of correct facts in greedy outputs for held-out scenes, captions and answers
to questions as they come; a caption states many more facts than an answer; `textured` are images
of the same facts on materials, with things at free positions, and drawings are flat ones of any
size, each scored by name, colour, size and place of its things. `vision invariance steps` are
those on textured images and drawings. `acceptance length` is tokens per round of greedy chain
speculation with five drafted tokens, on held-out scenes, plain, textured and drawn. All are
measured on the float16 weights, run in float32.
"""
HELD_OUT = 128
BATCH = 32


@dataclass(frozen=True)
class LanguagePlan:
    """Training plan of a checkpoint: vision steps, answer stages, then invariance stages.

    Each stage is one decay of the learning rate. A deep narrow model needs several: hard lookups
    are learned after the rate rises again.
    """

    family: str
    shape: LanguageShape
    vision_steps: int
    answer_stages: tuple[CosineDecay, ...]
    pool: int = 0  # answers of the target that a drafter is trained on
    start: str | None = None  # checkpoint that provides the text layers
    invariance_stages: tuple[CosineDecay, ...] = ()  # with a frozen text model
    renderer: Renderer = render_plain  # of the images that a drafter is trained on


PLANS = {
    "llava": LanguagePlan(
        "llava",
        LLAVA_TARGET,
        600,
        (
            CosineDecay(2600, 1.5e-3),
            CosineDecay(1600, 1e-3),
            CosineDecay(900, 8e-4),
            CosineDecay(1200, 9e-4),
        ),
        invariance_stages=(CosineDecay(8000, 1e-3), CosineDecay(4000, 6e-4)),
    ),
    "llava-drafter": LanguagePlan(
        "llava", SIGHTED, 600, (CosineDecay(2400, 2e-3),), 6144, renderer=render_any_style
    ),
    "llava-text-drafter": LanguagePlan("llava", BLIND, 0, (CosineDecay(1500, 2e-3),), pool=4096),
    "qwen2.5-vl": LanguagePlan(
        "qwen2.5-vl",
        QWEN_TARGET,
        400,
        (CosineDecay(800, 1e-3), CosineDecay(450, 7e-4), CosineDecay(1000, 9e-4)),
        start="llava",
        invariance_stages=(CosineDecay(12000, 1e-3), CosineDecay(4000, 7e-4)),
    ),
    "qwen2.5-vl-drafter": LanguagePlan(
        "qwen2.5-vl",
        SIGHTED,
        600,
        (CosineDecay(1600, 1.5e-3),),
        pool=4096,
        start="llava-drafter",
        renderer=render_any_style,
    ),
    "qwen2.5-vl-text-drafter": LanguagePlan(
        "qwen2.5-vl", BLIND, 0, (CosineDecay(400, 1e-3),), pool=2048, start="llava-text-drafter"
    ),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train a model on images, then on answers; some start from another checkpoint."""
    plan = PLANS[entry.name]
    family = FAMILIES[plan.family]
    processor, course = family.build_processor(), TrainingRun(seed, steps, progress)
    encoder = Encoder(family, processor)
    model = family.build(plan.shape, processor.tokenizer).train()
    with save_on_exit(lambda: save(model, processor, folder, sees=entry.sees == "pixels")):
        if plan.start is not None:
            _start_from(plan, model, encoder, course)
        elif plan.vision_steps:
            train_vision(model, family, plan.vision_steps, course, plan.renderer)
        batches = _batches(entry, encoder, course.limit_steps(plan.pool, BATCH), course)
        for fall in plan.answer_stages:
            train_on_responses(model, family, batches, fall, course)
        if plan.invariance_stages:
            train_vision_invariance(model, family, plan.invariance_stages, course)
    return {
        "steps": sum(course.limit_steps(fall.steps) for fall in plan.answer_stages),
        "vision_invariance_steps": sum(
            course.limit_steps(fall.steps) for fall in plan.invariance_stages
        ),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Return shares of facts right (target), or acceptance lengths at five draft tokens."""
    model, family = load(entry, folder), FAMILIES[PLANS[entry.name].family]
    processor = family.build_processor()
    if entry.target is not None:
        target, encoder = load_teacher(entry.target), Encoder(family, processor)
        renderers = {"": render_plain, "_textured": render_textured, "_drawn": render_drawing}
        return {
            f"acceptance_length{end}": acceptance(model, target, encoder, count, renderer=renderer)
            for end, renderer in renderers.items()
        }
    kinds: dict[str, ExampleKind | None] = {
        "facts": None,
        "facts_in_captions": "caption",
        "facts_in_answers": "question",
    }
    sets = {name: examples(count, "held-out", kind=kind) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        sets[f"{name}_textured"] = examples(count, "held-out", kind=kind, style="textured")
    sets["facts_in_drawings"] = sample_drawings(count)
    report = {}
    for name, some in sets.items():
        right, total = facts_right(model, processor, some)
        report[name] = round(right / max(total, 1), 4)
    return report


def save(model: PreTrainedModel, processor: Any, folder: Path, sees: bool) -> None:
    """Save weights, configs and the processor, or the tokenizer of a text model."""
    configure: Any = GenerationConfig
    tokenizer = get_tokenizer(processor)
    model.generation_config = configure(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    cast: Any = model.half
    cast().save_pretrained(folder)
    if sees:
        processor.save_pretrained(folder)
    else:
        tokenizer.chat_template = processor.chat_template
        tokenizer.save_pretrained(folder)


def _batches(entry: Entry, encoder: Encoder, pool: int, course: TrainingRun) -> Iterator[Batch]:
    """Return batches of new scenes for a target, or of its target's answers for a drafter."""
    if entry.target is None:
        return (encoder(samples) for samples in iterate_samples(BATCH, course.seed))
    renderer = PLANS[entry.name].renderer
    answers = sample_target_responses(load_teacher(entry.target), encoder, pool, course, renderer)
    return iterate_batches(
        answers, encoder, BATCH, course.seed, renderer, blind=entry.sees == "nothing"
    )


def _start_from(
    plan: LanguagePlan, model: PreTrainedModel, encoder: Encoder, course: TrainingRun
) -> None:
    """Start from the text layers of another family's checkpoint, and match its image features."""
    name = plan.start
    assert name is not None
    other, other_family = load_teacher(name), FAMILIES[PLANS[name].family]
    copy_text_layers(model, encoder.tokenizer, other, other_family.build_processor().tokenizer)
    if info(name).sees == "pixels":
        source = (other, other_family)
        distil_vision(model, encoder.family, source, plan.vision_steps, course, plan.renderer)


@torch.no_grad()
def copy_text_layers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    other: PreTrainedModel,
    other_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Copy layers, norms and embeddings of common tokens from `other` to `model`.

    Both text models have the same shape. Parameters that only `model` has (the biases of Qwen2) are
    not changed.
    """
    source = dict(_text(other).named_parameters())
    for name, weight in _text(model).named_parameters():
        if name in source and source[name].shape == weight.shape:
            weight.copy_(source[name])
    known = other_tokenizer.get_vocab()
    here, there = _vectors(model), _vectors(other)
    for word, row in tokenizer.get_vocab().items():
        if word in known:
            here[row] = there[known[word]]


def _text(model: PreTrainedModel) -> nn.Module:
    """Return the layers and the last norm of a text model."""
    decoder = model.get_decoder()
    return nn.ModuleDict({"layers": decoder.layers, "norm": decoder.norm})


def _vectors(model: PreTrainedModel) -> Tensor:  # -> (V, D)
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight
