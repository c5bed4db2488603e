"""What every system trains: its draft model, and its losses by stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmspec.modality import Entry
from mmspec.recipe import STATES
from mmspec.targets.readers.reader import Reader
from mmspec.training.aasd import aasd_loss, new_aasd_head
from mmspec.training.dream import dream_loss, new_dream_head
from mmspec.training.elastic import elastic_loss, new_elastic_head
from mmspec.training.heads import TrainingExample, head_loss, new_head
from mmspec.training.kangaroo import imitation_loss, new_imitation
from mmspec.training.medusa_hydra import new_medusa
from mmspec.training.multi_token import heads_loss
from mmspec.training.self_fed import aligned_loss, eagle3_loss, new_eagle3
from mmspec.training.semi_autoregressive import block_loss, new_block_head
from mmspec.training.small_model import small_model_loss
from mmspec.training.trainable import trainable_parameters
from mmspec.training.vispec import text_loss, vispec_loss
from tools.zoo.vlm.systems.examples import CAPTIONS, PICTURES, TEXT, ExampleSource
from tools.zoo.vlm.systems.small import (
    decoder_layers,
    distillation_loss,
    new_projected_model,
    new_sighted_model,
    new_text_model,
    projector_parameters,
    token_loss,
)

Draw = Callable[[ExampleSource, float], TrainingExample]
Loss = Callable[[Reader, Any, TrainingExample], Tensor]
_PATH = "tools.zoo.vlm.systems.train"
_RATE = 2e-3
_INNER = {"intermediate_size": 384}


def draw_pictures(source: ExampleSource, done: float) -> TrainingExample:
    return source.next(PICTURES)


def draw_text(source: ExampleSource, done: float) -> TrainingExample:
    return source.next(TEXT)


def draw_captions(source: ExampleSource, done: float) -> TrainingExample:
    return source.next(CAPTIONS)


@dataclass(frozen=True)
class Stage:
    """A share of the budget: a loss on examples; `trains` selects the parameters."""

    about: str  # for the card
    loss: Loss
    draw: Draw = draw_pictures
    share: float = 1.0
    rate: float = _RATE
    trains: Callable[[Any], Iterable[nn.Parameter]] = trainable_parameters


@dataclass(frozen=True)
class Plan:
    """A draft model and its training. `begin` makes it: (target, token counts, **changes)."""

    description: str
    recipe: str  # that it is measured with
    begin: Callable[..., Any]
    stages: tuple[Stage, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    recipes: tuple[str, ...] = ()  # that it is the default of; empty = whatever takes it
    sees: str = STATES
    caches: bool = False  # whether its losses read the target's last states and nothing else
    control: str | None = None  # why other pictures cannot be put in its sight; None = they can
    size: str = ""  # why its number of parameters differs
    matrices: Callable[[Any], nn.Module] = lambda head: head  # whose matrices Muon trains


_TEXT_STATES = "it sees no picture: what it knows of it are the target's states of the text"
_TEXT_STAGE = "on the questions and answers without pictures"
PLANS = {
    "vispec": Plan(
        "ViSpec head: one layer; a resampler replaces the image by one slot and one vector.",
        "vispec",
        partial(new_head, visual_slots="compressed", num_q=2),
        (
            Stage(
                f"smooth L1 of states, cross entropy, ListMLE, {_TEXT_STAGE}",
                text_loss,
                draw_text,
                0.5,
            ),
            Stage(
                "10 x total variation and ListMLE, two passes, on the target's answers",
                vispec_loss,
                draw_pictures,
                0.5,
            ),
        ),
        _INNER,
        ("vispec",),
        caches=True,
        size="a resampler and the fusion of its vector come on top",
    ),
    "specvlm": Plan(
        "SpecVLM head: one layer; a gate selects how the image is compressed, by the question.",
        "specvlm",
        new_elastic_head,
        (
            Stage(
                "smooth L1 of states and cross entropy against the target's distributions, computed"
                " online, of all branches, weighted by the gate",
                elastic_loss,
            ),
        ),
        {**_INNER, "queries": 8},
        ("specvlm",),
        size="gate, convolution and resampler come on top",
    ),
    "msd": Plan(
        "MSD head: one layer; image slots are plain embeddings.",
        "msd",
        partial(new_head, visual_slots="raw"),
        (
            Stage(
                f"smooth L1 of states and cross entropy, {_TEXT_STAGE}", head_loss, draw_text, 0.5
            ),
            Stage(
                "the same; the share of answers with pictures rises from 0 to 1",
                head_loss,
                ExampleSource.from_text_to_pictures,
                0.5,
            ),
        ),
        _INNER,
        ("msd",),
        caches=True,
    ),
    "specflash": Plan(
        "SpecFLASH head: one attention layer that predicts 5 states at once; 8 latents per image.",
        "specflash",
        new_block_head,
        (
            Stage(
                "smooth L1 of states and cross entropy, of the next 5 tokens from each state",
                block_loss,
            ),
        ),
        {"intermediate_size": 256, "num_latents": 8},
        ("specflash",),
        caches=True,
        size="no MLP in its layer, and one to 5 states after it",
    ),
    "hivis": Plan(
        "HiViS head: one layer that reads text slots only, with a residual per self-fed step.",
        "hivis",
        partial(new_head, visual_slots="hidden", positions="compact", num_steps=7),
        (
            Stage(
                "smooth L1 of states and cross entropy in mean over 8 passes on its own states",
                partial(aligned_loss, passes=8, top_weight=0.0),
            ),
        ),
        _INNER,
        ("hivis",),
        caches=True,
        control=_TEXT_STATES,
    ),
    "aasd": Plan(
        "AASD head: one layer on the target's keys and values, images projected to a third.",
        "aasd",
        new_aasd_head,
        (
            Stage(
                "cross entropy against the target's distributions and smooth L1 of states, the last"
                " 1 to 5 keys its own",
                aasd_loss,
            ),
        ),
        {**_INNER, "image_slots": 12, "image_size": 36},
        ("aasd",),
        control="it attends to the target's keys and values themselves",
    ),
    "dream": Plan(
        "DREAM head: two layers and a cross-attention to the target's states between them.",
        "dream",
        new_dream_head,
        (
            Stage(
                "smooth L1 of states, divergence of distributions, smooth L1 of the middle to the"
                " early states of least attention entropy",
                dream_loss,
            ),
        ),
        {"intermediate_size": 96},
        ("dream",),
        size="three layers, so their inner width is 96 and not 384",
    ),
    "fastvlm": Plan(
        "FastVLM: an imitation network after the first quarter of the target's layers.",
        "fastvlm",
        new_imitation,
        (
            Stage(
                "cross entropy against the target's distributions and tokens, and cosine to its"
                " last states",
                imitation_loss,
            ),
        ),
        _INNER,
        ("fastvlm",),
        control="it continues the target's own early states",
        size="nothing reads embeddings; a quarter of the target's layers drafts with it",
    ),
    "massv": Plan(
        "MASSV: a language model of one layer and a projector of its target's vision features.",
        "massv",
        new_projected_model,
        (
            Stage(
                "cross entropy of reference captions, projector alone",
                small_model_loss,
                draw_captions,
                0.2,
                trains=projector_parameters,
            ),
            Stage(
                "cross entropy of the target's answers (self-data distillation)",
                small_model_loss,
                share=0.8,
            ),
        ),
        recipes=("massv",),
        sees="target-features",
        matrices=decoder_layers,
        size="the word embeddings are its own",
    ),
    "spec-llava": Plan(
        "Small model of its target's class: a vision and a text layer, distilled on distributions.",
        "spec-llava",
        new_sighted_model,
        (
            Stage(
                "cross entropy against the target's distributions, computed online",
                distillation_loss,
            ),
        ),
        recipes=("spec-llava",),
        sees="pixels",
        caches=True,
        matrices=decoder_layers,
        size="the word embeddings and the vision tower (trained before) are its own",
    ),
    "drafter": Plan(
        "Small model of its target's class: one vision layer and one text layer; reads the image.",
        "coupled",
        new_sighted_model,
        (Stage("cross entropy of the target's answers", token_loss),),
        sees="pixels",
        matrices=decoder_layers,
        size="the word embeddings and the vision tower (trained before) are its own",
    ),
    "text-drafter": Plan(
        "Language model of one layer with the tokenizer of its target; does not read the image.",
        "spd-mllm",
        new_text_model,
        (Stage("cross entropy of the target's answers", small_model_loss),),
        sees="nothing",
        control="it reads no picture",
        matrices=decoder_layers,
        size="the word embeddings are its own",
    ),
    "feature-head": Plan(
        "Feature head (EAGLE, HASS): one layer on its target's last states.",
        "hass",
        new_head,
        (
            Stage(
                "smooth L1 of states, cross entropy, the target's likeliest tokens, in mean over 5"
                " passes on its own states",
                partial(aligned_loss, passes=5),
            ),
        ),
        _INNER,
        ("eagle", "eagle-2", "hass"),
        caches=True,
    ),
    "eagle3": Plan(
        "EAGLE-3 head: one layer on three layers of its target.",
        "eagle-3",
        new_eagle3,
        (Stage("cross entropy against distributions in 7 passes on its own states", eagle3_loss),),
        {**_INNER, "visual_slots": "fused", "positions": "keep"},
        ("eagle-3",),
        size="an output head of its own comes on top",
    ),
    "medusa": Plan(
        "Medusa heads: independent heads on its target's last state.",
        "medusa",
        new_medusa,
        (Stage("cross entropy of every head, discounted by 0.8", heads_loss),),
        {"medusa_num_heads": 5},
        ("medusa",),
        caches=True,
        control=_TEXT_STATES,
        size="an output matrix per head",
    ),
}


def entry_of(target: str, head: str) -> Entry:
    """The entry of a draft model of a target."""
    plan = PLANS[head]
    return Entry(
        f"{target}-{head}",
        plan.description,
        _PATH,
        "mmspec.modalities.vlm.checkpoints",
        target,
        sees=plan.sees,
        recipes=plan.recipes,
    )


def plan_of(entry: Entry) -> Plan:
    """The plan of a draft model, by the name after its target's. Raises ValueError for others."""
    assert entry.target is not None
    head = entry.name.removeprefix(f"{entry.target}-")
    if head not in PLANS:
        raise ValueError(f"{entry.name} has no plan; choose one of {', '.join(PLANS)}")
    return PLANS[head]
