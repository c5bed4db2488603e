"""Train the language checkpoints of the zoo from a seed, in minutes on two CPU cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from mmspec.modalities.vlm.checkpoints import load
from mmspec.modality import Entry
from mmspec.training.fitting import Course, Fall
from mmspec.training.reporting import Report
from mmspec.zoo.catalogue import info
from mmspec.zoo.language import ExampleKind, examples
from mmspec.zoo.training import kept, teacher
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
    Looks,
    as_drawing,
    fresh,
    on_any_ground,
    on_materials,
    plainly,
)
from tools.zoo.vlm.distil import lessons, said_by
from tools.zoo.vlm.evaluate import acceptance, drawings, facts_right
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.learning import learn_to_see, learn_to_see_like, learn_to_talk
from tools.zoo.vlm.sight import learn_to_see_anywhere
from tools.zoo.vlm.transfer import speak_like

ABOUT = """\
Knows only the Scene world of the `mmspec` zoo: coloured shapes and written digits on a
board of nine places, one picture and one question at a time.

A target learned from fresh scenes, first to name what is in each cell, then to answer; then to show
its text model, of textured pictures and of flat drawings, what it shows of plain pictures. A
drafter learned from what its target says about training scenes, one that sees about scenes of all
these looks.
"""
NOTES = """\
`facts` is the share of facts right in what it says greedily of held-out scenes,
captions and answers to questions as they come; a caption states many more facts than an answer;
`textured` are pictures of the same facts on materials, with things at free places, and drawings are
flat ones of any size, each held to name, colour, size and place of its things.
`acceptance length` is tokens per round of greedy chain speculation with five drafted tokens, on
held-out scenes, plain, textured and drawn. All is measured on the float16 weights, run in float32.
"""
HELD_OUT = 128
BATCH = 32


@dataclass(frozen=True)
class LanguagePlan:
    """How a checkpoint is trained: `seeing` steps on pictures alone, `talking`, then `anywhere`.

    Talking is one or more falls of the rate, one after the other. A deep narrow
    model needs several: each time the rate rises again, what was hard to look up is learnt further.
    """

    family: str
    shape: LanguageShape
    seeing: int
    talking: tuple[Fall, ...]
    pool: int = 0  # answers of the target that a drafter learns from
    start: str | None = None  # whose text layers to begin with
    anywhere: tuple[Fall, ...] = ()  # see the same on any ground, the text model as it is
    looks: Looks = plainly  # of the pictures that a drafter learns from


PLANS = {
    "llava": LanguagePlan(
        "llava",
        LLAVA_TARGET,
        600,
        (Fall(2600, 1.5e-3), Fall(1600, 1e-3), Fall(900, 8e-4), Fall(1200, 9e-4)),
        anywhere=(Fall(8000, 1e-3), Fall(4000, 6e-4)),
    ),
    "llava-drafter": LanguagePlan(
        "llava", SIGHTED, 600, (Fall(2400, 2e-3),), 6144, looks=on_any_ground
    ),
    "llava-text-drafter": LanguagePlan("llava", BLIND, 0, (Fall(1500, 2e-3),), pool=4096),
    "qwen2.5-vl": LanguagePlan(
        "qwen2.5-vl",
        QWEN_TARGET,
        400,
        (Fall(800, 1e-3), Fall(450, 7e-4), Fall(1000, 9e-4)),
        start="llava",
        anywhere=(Fall(12000, 1e-3), Fall(4000, 7e-4)),
    ),
    "qwen2.5-vl-drafter": LanguagePlan(
        "qwen2.5-vl",
        SIGHTED,
        600,
        (Fall(1600, 1.5e-3),),
        pool=4096,
        start="llava-drafter",
        looks=on_any_ground,
    ),
    "qwen2.5-vl-text-drafter": LanguagePlan(
        "qwen2.5-vl", BLIND, 0, (Fall(400, 1e-3),), pool=2048, start="llava-text-drafter"
    ),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach a model to see and to talk; some begin with the text layers of another checkpoint."""
    plan = PLANS[entry.name]
    family = FAMILIES[plan.family]
    processor, course = family.build_processor(), Course(seed, steps, progress)
    encoder = Encoder(family, processor)
    model = family.build(plan.shape, processor.tokenizer).train()
    with kept(lambda: save(model, processor, folder, sees=entry.sees == "pixels")):
        if plan.start is not None:
            _begin_like(plan, model, encoder, course)
        elif plan.seeing:
            learn_to_see(model, family, plan.seeing, course, plan.looks)
        batches = _batches(entry, encoder, course.cut(plan.pool, BATCH), course)
        for fall in plan.talking:
            learn_to_talk(model, family, batches, fall, course)
        if plan.anywhere:
            learn_to_see_anywhere(model, family, plan.anywhere, course)
    return {
        "steps": sum(course.cut(fall.steps) for fall in plan.talking),
        "steps_of_sight": sum(course.cut(fall.steps) for fall in plan.anywhere),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Facts right (a target), or tokens per round at five drafted tokens (a drafter)."""
    model, family = load(entry, folder), FAMILIES[PLANS[entry.name].family]
    processor = family.build_processor()
    if entry.target is not None:
        target, encoder = teacher(entry.target), Encoder(family, processor)
        ways = {"": plainly, "_textured": on_materials, "_drawn": as_drawing}
        return {
            f"acceptance_length{end}": acceptance(model, target, encoder, count, looks=looks)
            for end, looks in ways.items()
        }
    kinds: dict[str, ExampleKind | None] = {
        "facts": None,
        "facts_in_captions": "caption",
        "facts_in_answers": "question",
    }
    asked = {name: examples(count, "held-out", kind=kind) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        asked[f"{name}_textured"] = examples(count, "held-out", kind=kind, style="textured")
    asked["facts_in_drawings"] = drawings(count)
    report = {}
    for name, some in asked.items():
        right, all_of_them = facts_right(model, processor, some)
        report[name] = round(right / max(all_of_them, 1), 4)
    return report


def save(model: PreTrainedModel, processor: Any, folder: Path, sees: bool) -> None:
    """Save weights, configs and the processor, or only the tokenizer of a text model."""
    configure: Any = GenerationConfig
    tokenizer = processor.tokenizer
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


def _batches(entry: Entry, encoder: Encoder, pool: int, course: Course) -> Iterator[Batch]:
    """Fresh scenes for a target; for a drafter, what its target says."""
    if entry.target is None:
        return (encoder(samples) for samples in fresh(BATCH, course.seed))
    looks = PLANS[entry.name].looks
    said = said_by(teacher(entry.target), encoder, pool, course, looks)
    return lessons(said, encoder, BATCH, course.seed, looks, blind=entry.sees == "nothing")


def _begin_like(
    plan: LanguagePlan, model: PreTrainedModel, encoder: Encoder, course: Course
) -> None:
    """Begin with the language of a checkpoint of another family, and learn to see what it sees."""
    name = plan.start
    assert name is not None
    other, other_family = teacher(name), FAMILIES[PLANS[name].family]
    speak_like(model, encoder.tokenizer, other, other_family.build_processor().tokenizer)
    if info(name).sees == "pixels":
        seen_by = (other, other_family)
        learn_to_see_like(model, encoder.family, seen_by, plan.seeing, course, plan.looks)
