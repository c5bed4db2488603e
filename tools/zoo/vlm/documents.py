"""Train the models of VideoSpeculateRAG: both read documents, and the large one judges drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import ProcessorMixin

from mmspec.modalities.vlm.document_answers import (
    SEED,
    DirectAnswer,
    make_formatter,
    measure_accuracy,
)
from mmspec.modalities.vlm.video_rag import DRAFT, FIELDS, JUDGE, parse_fields
from mmspec.modality import Entry
from mmspec.registry import ZOO
from mmspec.training.fitting import CosineDecay, TrainingProgress, TrainingRun, iterate_chunks
from mmspec.zoo.clip_documents import (
    DOCUMENTS,
    NAMES,
    DocumentQuestion,
    document_questions,
    write_document_question,
)
from mmspec.zoo.clip_questions import clip_words, score_clip
from mmspec.zoo.language import words
from mmspec.zoo.motion import MovingScene, sample_moving_scenes
from mmspec.zoo.tokenizer import vocabulary
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.vlm.architecture import CLIP_TARGET, clip_qwen
from tools.zoo.vlm.clip_batches import GRIDS, ClipBatcher, TrainingStage, render_frames
from tools.zoo.vlm.clips import (
    GENERATION_BATCH,
    SHALLOW_LAYERS,
    Clips,
    compute_features,
    deepen,
    generate_responses,
    train_text_model,
)
from tools.zoo.vlm.processors import qwen_processor
from tools.zoo.vlm.train import save

ABOUT = """\
Answers questions about moving scenes of the `mmspec` zoo that a document has to answer: it says
which thing a name stands for. Several documents are given, and one of them names a thing of the
clip. An answer has a subject, a reasoning and an answer. The large model also says yes or no to an
answer of the small one (VideoSpeculateRAG, `mmspec.modalities.vlm.video_rag`).

The small model starts from every fourth layer of `video`, and is trained on the right document of
each question. The large one has four times its layers: it starts with the same outputs (block
expansion), and is trained on real answers of the small one to every document, right or wrong, and
to answer from all documents itself.
"""
NOTES = """\
Figures are shares of facts right on held-out clips, with standard errors (`error of`): of the small
model with the right document, with a wrong one or with all of them; of the large one, `plain` is
that with all of them, and others are selections of answers of the small one to each: by both
scores, by one of them (delta = 0: the reliability, delta = 1: the alignment), or at random.
Measured on the float16 weights, run in float32.
"""
HELD_OUT = 120
BASE, SMALL = "video", "video-rag-drafter"
POOL, QUESTIONS = 1200, 6  # clips of the small model, and questions for each
JUDGED = 480  # clips of the large one: the small one answers a question from every document
STAGES = (
    TrainingStage(CosineDecay(400, 1e-3), 4, 8),
    TrainingStage(CosineDecay(40, 3e-4), 4, GRIDS),
)
JUDGE_STAGES = (
    TrainingStage(CosineDecay(190, 8e-4), 4, 8),
    TrainingStage(CosineDecay(30, 3e-4), 4, GRIDS),
)

Pairs = list[tuple[str, str]]  # prompts and answers


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train the small model that drafts, or the large one on its answers."""
    run, processor = TrainingRun(seed, steps, progress), document_processor()
    clips = sample_moving_scenes(run.limit_steps(POOL, 4), seed=seed + 2)
    if entry.target is not None:
        model, stages = start_small(processor), STAGES
        answers = [write_pairs(*one, only_right=True) for one in clips]
    else:
        model, stages = deepen(load_teacher(SMALL), processor, CLIP_TARGET), JUDGE_STAGES
        clips = clips[:JUDGED]
        answers = collect_verdicts(clips, run)
    features = compute_features(model, clips, run)
    batcher = ClipBatcher(model, processor, len(answers[0]))
    with save_on_exit(lambda: save(model, processor, folder, sees=True)):
        for number, stage in enumerate(stages):
            batches = batcher.iterate_rendered(
                [scene for scene, _ in clips], features, stage, seed + number, answers
            )
            train_text_model(model, batches, stage.decay, run)
    return {
        "steps": sum(run.limit_steps(stage.decay.steps) for stage in stages),
        "clips": len(clips),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Return shares of facts right of all ways to answer, or those of the small model alone."""
    if entry.target is None:
        return measure_accuracy(str(folder), f"{ZOO}{SMALL}", count)
    small, asked = make_formatter(str(folder)), document_questions(count, seed=SEED)
    ways = {
        "facts with the right document": [_only(one, one.right) for one in asked],
        "facts with a wrong document": [_only(one, one.right - 1) for one in asked],
        "facts with all documents": asked,
    }
    report = {}
    for name, some in ways.items():
        texts = [DirectAnswer(small).run({"asked": one}, 0).output for one in some]
        pairs = [score_clip(one.example, text) for one, text in zip(some, texts, strict=True)]
        right, total = (sum(column) for column in zip(*pairs, strict=True))
        report[name] = round(right / max(total, 1), 4)
    return report


def document_processor() -> ProcessorMixin:
    """Build the processor of the clip models with the words of documents and of verdicts."""
    judge = JUDGE.format_map(dict.fromkeys(("question", *FIELDS), ""))
    templates = DRAFT.format(question="", document=""), judge
    asked = sorted({word for text in (*templates, *NAMES) for word in words(text.lower())})
    known = {*vocabulary()}
    more = (word for word in dict.fromkeys((*clip_words(), *asked)) if word not in known)
    return qwen_processor(more=tuple(more), model_max_length=4096)


@torch.no_grad()
def start_small(processor: Any) -> Any:
    """Evenly spread layers of the base, with the words of a processor."""
    base, shape = load_teacher(BASE), replace(CLIP_TARGET, layers=SHALLOW_LAYERS)
    table = base.get_input_embeddings().weight
    model: Any = clip_qwen(shape, processor.tokenizer)
    own = model.state_dict()
    for name, weight in base.state_dict().items():
        if ".language_model.layers." not in name:
            own[name][: len(weight)] = weight
    new = own["lm_head.weight"][len(table) :]  # is the table of embeddings, too
    new *= table.std() / new.std()
    layers = base.model.language_model.layers[:: CLIP_TARGET.layers // SHALLOW_LAYERS]
    for mine, theirs in zip(model.model.language_model.layers, layers, strict=True):
        mine.load_state_dict(theirs.state_dict())
    return model.train()


def write_pairs(scene: MovingScene, number: int, only_right: bool) -> Pairs:
    """Questions about a clip with the right document or all of them, and their answers."""
    found = []
    for at in range(QUESTIONS):
        one = _question(scene, number, at)
        shown = one.documents[one.right : one.right + 1] if only_right else one.documents
        prompt = DRAFT.format(question=one.example.prompt, document=" ".join(shown))
        found.append((prompt, write_answer(one)))
    return found


def write_answer(one: DocumentQuestion) -> str:
    """The answer to learn, in three fields."""
    subject, document = one.subjects[one.right], one.documents[one.right]
    return f"subject: {subject} reasoning: {document} answer: {one.example.answer}"


def collect_verdicts(clips: Clips, run: TrainingRun) -> list[Pairs]:
    """Verdicts to learn on answers of the small model, and as many answers from all documents."""
    small, processor = load_teacher(SMALL), document_processor()
    questions = [_question(*one, QUESTIONS) for one in clips]
    asked = [(at, document) for at, one in enumerate(questions) for document in one.documents]
    found = [write_pairs(*one, only_right=False)[:DOCUMENTS] for one in clips]
    for some in iterate_chunks(asked, GENERATION_BATCH, "drafts", run.progress):
        frames = [
            torch.from_numpy(render_frames(clips[at][0])).permute(0, 3, 1, 2) for at, _ in some
        ]
        prompts = [
            DRAFT.format(question=questions[at].example.prompt, document=document)
            for at, document in some
        ]
        texts = generate_responses(small, processor, frames, prompts).texts
        for (at, _), text in zip(some, texts, strict=True):
            found[at].append(write_verdict(questions[at], text))
    return found


def write_verdict(one: DocumentQuestion, text: str) -> tuple[str, str]:
    """The prompt about a draft, and "yes" where its answer has the facts and nothing else."""
    fields = parse_fields(text)
    right, total = score_clip(one.example, fields["answer"])
    prompt = JUDGE.format(question=one.example.prompt, **fields)
    return prompt, "yes" if right == total else "no"


def _only(one: DocumentQuestion, document: int) -> DocumentQuestion:
    """A question with one of its documents."""
    return replace(one, documents=(one.documents[document],))


def _question(scene: MovingScene, number: int, at: int) -> DocumentQuestion:
    """One of several questions about a training clip."""
    return write_document_question(scene, number + (at << 50))
