"""Speculative retrieval-augmented generation for clips: one draft and one verdict per document.

    drafter, verifier = (LanguageFormatter(name, load(name), LanguageSettings()) for name in names)
    align = ClipAlignment(clip_model, clip_processor)
    found = speculate_from_documents(drafter, verifier, question, clip, documents, align)

VideoSpeculateRAG / FastV-RAG (Li and Liu 2026, arXiv 2601.01513). A small model answers once per
retrieved document, in one batch; the large one predicts Yes or No for each answer, all of them as
branches after one reading of the clip. This is not a recipe: drafts are whole answers. Lossy: the
output is an answer of the small model. The wording of the prompts is reconstructed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.functional import rgb_to_grayscale, to_pil_image

from mmspec.api import accelerate
from mmspec.draft import Draft, Kind
from mmspec.modalities.common import formatting
from mmspec.modalities.vlm.clips import VideoClip
from mmspec.modalities.vlm.formatting import format_chat
from mmspec.targets.memory import build_block
from mmspec.targets.readers.check import check
from mmspec.targets.tokens.context import cut_tokens

DRAFT = (
    "{question}\nEvidence: {document}\nAnswer in three lines.\n"
    "Subject: who or what it is about.\nReasoning: why.\nAnswer: the answer."
)
JUDGE = (
    "{question}\nSomebody answered:\nSubject: {subject}\nReasoning: {reasoning}\nAnswer: {answer}\n"
    "Is this answer right? Say Yes or No."
)
FIELDS = ("subject", "reasoning", "answer")
# similarity of names (n,) and images (k,): cosines (n, k)
Alignment = Callable[[Sequence[str], Sequence[Image.Image]], Tensor]


@dataclass(frozen=True)
class DocumentDraft:
    """The answer of the small model for one document, and its scores."""

    document: str
    text: str
    subject: str
    reasoning: str
    answer: str
    reliability: float = float("nan")  # P(Yes) / (P(Yes) + P(No)) of the large model
    decided: float = float("nan")  # P(Yes) + P(No)
    alignment: float = 0.0  # maximum over key frames, of the subject; 0 without a subject


@dataclass(frozen=True)
class DocumentVerdict:
    """The selected answer, and all drafts in the order of their documents."""

    answer: str
    selected: int
    drafts: tuple[DocumentDraft, ...]
    key_frames: tuple[int, ...]


def speculate_from_documents(
    drafter: Any,
    verifier: Any,
    question: str,
    clip: VideoClip,
    documents: Sequence[str],
    align: Alignment | None = None,
    delta: float = 0.3,
    recipe: Any = "plain",
    threshold: float = 0.8,
    **parts: Any,
) -> DocumentVerdict:
    """Answer a question about a clip: draft one answer per document, and return the best.

    `drafter` and `verifier` are `LanguageFormatter`s of models that read clips. Among the answers
    with a reliability within `delta` of the best one (0.3 in the released code), the one with the
    highest alignment is selected (`align`; default: 0 for all); ties go to the more reliable one,
    then to the earlier document. `recipe`, one without a draft model of its own, and `parts` apply
    to the drafter. Raises ValueError without documents, for a delta outside [0, 1], for a model
    that reads no clips, and if the verifier's tokenizer lacks "Yes" or "No".
    """
    if not documents or isinstance(documents, str):
        raise ValueError(
            f"documents={documents!r}, but each of a list makes one answer; give one or more texts"
        )
    if not 0 <= delta <= 1:
        raise ValueError(f"delta={delta}, but it bounds a difference of probabilities; give 0 to 1")
    texts = _generate_drafts(
        drafter, accelerate(drafter.model, recipe, **parts), question, clip, documents
    )
    drafts = [
        DocumentDraft(document, text, read["subject"], read["reasoning"], read["answer"])
        for document, text, read in zip(documents, texts, map(parse_fields, texts), strict=True)
    ]
    yes, no = _decisions(verifier, question, clip, drafts)
    frames = key_frames(clip.frames, threshold)
    fits = _alignments(drafts, clip, frames, align)
    decided = yes + no
    reliability = torch.where(decided > 0, yes / decided, 0.0)
    found = tuple(
        replace(
            one,
            reliability=float(reliability[at]),
            decided=float(decided[at]),
            alignment=float(fits[at]),
        )
        for at, one in enumerate(drafts)
    )
    selected = select(reliability, fits, delta)
    return DocumentVerdict(found[selected].answer, selected, found, tuple(frames))


def select(reliability: Tensor, alignment: Tensor, delta: float) -> int:  # (n,), (n,)
    """Return the best aligned answer with a reliability within `delta` of the maximum.

    delta = 0 selects the most reliable answer, delta = 1 the best aligned one.
    """
    threshold = float(reliability.max()) - delta
    candidates = [at for at in range(len(reliability)) if float(reliability[at]) >= threshold]
    return max(candidates, key=lambda at: (float(alignment[at]), float(reliability[at])))


def parse_fields(text: str) -> dict[str, str]:
    """Parse subject, reasoning and answer of a draft, in any order, case and layout; default "".

    Text without any field name is an answer.
    """
    names = "|".join(FIELDS)
    parts = re.split(rf"(?i)\b({names})\s*\**\s*:", text)
    found = dict.fromkeys(FIELDS, "")
    for name, value in zip(parts[1::2], parts[2::2], strict=True):
        found[name.lower()] = value.strip(" \t\n*_-")
    return found if len(parts) > 1 else {**found, "answer": text.strip()}


def key_frames(frames: Tensor, threshold: float = 0.8) -> list[int]:  # (F, 3, H, W) uint8
    """Return frames whose grey histogram (256 bins) correlates with the previous below `threshold`.

    Frame 0 is always included. The released code uses 0.6 for retrieval, 0.8 for alignment.
    """
    grey = rgb_to_grayscale(frames)[:, 0].flatten(1)
    bins = torch.stack([torch.bincount(one.long(), minlength=256) for one in grey]).double()
    centred = functional.normalize(bins - bins.mean(-1, keepdim=True), dim=-1)
    alike = (centred[1:] * centred[:-1]).sum(-1)
    return [0, *(1 + (alike < threshold).nonzero()[:, 0]).tolist()]


def nearest_documents(
    queries: Tensor, index: Tensor, count: int
) -> list[int]:  # (k, D), (m, D) -> at most count numbers
    """Return the documents nearest to any of the queries by cosine, nearest first, without repeats.

    Raises ValueError for count < 1.
    """
    if count < 1:
        raise ValueError(f"count={count} documents; give 1 or more")
    units = [functional.normalize(one.double(), dim=-1) for one in (queries, index)]
    best = (units[0] @ units[1].T).amax(0)
    return best.argsort(descending=True, stable=True)[:count].tolist()


@dataclass(frozen=True)
class ClipAlignment:
    """Cosine similarity of names and images by a CLIP model of transformers and its processor."""

    model: Any
    processor: Any

    @torch.no_grad()
    def __call__(self, names: Sequence[str], pictures: Sequence[Image.Image]) -> Tensor:
        inputs = self.processor(
            text=list(names), images=list(pictures), padding=True, return_tensors="pt"
        ).to(self.model.device)
        out = self.model(**inputs)
        texts, images = (
            functional.normalize(one.double(), dim=-1)
            for one in (out.text_embeds, out.image_embeds)
        )
        return texts @ images.T


def _generate_drafts(
    formatter: Any, fast: Any, question: str, clip: VideoClip, documents: Sequence[str]
) -> list[str]:
    """Generate the answers as one batch, one row per document."""
    prompts = [DRAFT.format(question=question, document=one) for one in documents]
    request = formatter.request(prompts, videos=[clip] * len(prompts))
    out = fast.generate(**request)
    new = out.sequences[:, request["input_ids"].shape[1] :]
    tokenizer = formatting.get_tokenizer(formatter.processor)
    return [str(tokenizer.decode(row, skip_special_tokens=True)).strip() for row in new]


@torch.no_grad()
def _decisions(
    formatter: Any, question: str, clip: VideoClip, drafts: Sequence[DocumentDraft]
) -> tuple[Tensor, Tensor]:  # (n,), (n,)
    """Return P(Yes) and P(No) of every draft.

    The large model reads the clip and the question once, then all drafts as branches of one block;
    if it reads no trees, prompts of a batch.
    """
    prompts = [
        JUDGE.format(question=question, **{name: getattr(one, name) for name in FIELDS})
        for one in drafts
    ]
    reader = accelerate(formatter.model, "plain").session.bound.backbone
    logits = _read_branches(reader, formatter, prompts, clip) if reader.reads_trees else None
    if logits is None:
        _, logits, _ = reader.prefill(_make_inputs(formatter, prompts, clip), extra_slots=1)
    distribution = logits.double().softmax(-1)
    yes, no = (distribution[:, _first_token(formatter, word)] for word in ("Yes", "No"))
    return yes, no


def _read_branches(
    reader: Any, formatter: Any, prompts: Sequence[str], clip: VideoClip
) -> Tensor | None:  # (n, V)
    """Next-token logits of prompts about a clip that begin with the same words.

    The clip and those are read once, as are equal prompts. None if the prompts differ before the
    end of the clip, and if the model would misread branches.
    """
    inputs = _make_inputs(formatter, prompts[:1], clip)
    ids = inputs["input_ids"][0].tolist()
    tokenizer = formatting.get_tokenizer(formatter.processor)
    texts = [format_chat(formatter.processor, prompt, ["video"]) for prompt in prompts]
    suffixes = _suffixes(tokenizer(texts).input_ids)  # the clip is one token in these
    shared = len(ids) - len(suffixes[0])
    seen = {token for suffix in suffixes for token in suffix}
    if shared < 2 or tuple(ids[shared:]) != suffixes[0] or seen & {*reader.placeholder_ids}:
        return None
    inputs = cut_tokens(inputs, shared - 1)
    memory, logits, _ = reader.prefill(inputs, extra_slots=1 + sum(map(len, suffixes)))
    try:
        if check(reader, inputs, memory, logits, uses_trees=True):
            return None
    except ValueError:
        return None
    tokens, parents, ends = list[int](), list[int](), dict[tuple[int, ...], int]()
    for suffix in dict.fromkeys(suffixes):
        parents += [-1, *range(len(tokens), len(tokens) + len(suffix) - 1)]
        tokens += suffix
        ends[suffix] = len(tokens)
    nodes, above = (torch.tensor([one], device=reader.device) for one in (tokens, parents))
    real = torch.ones_like(nodes, dtype=torch.bool)
    draft = Draft(nodes, above, real, Kind.DET, padded=False)
    read, _ = reader.read(memory, build_block([ids[shared - 1 : shared]], draft, memory.like))
    found: Tensor = read[0, [ends[suffix] for suffix in suffixes]]
    return found


def _suffixes(rows: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """What follows the tokens that all rows have in common; at least one of each."""
    shortest = min(map(len, rows)) - 1
    differ = (at for at in range(shortest) if len({row[at] for row in rows}) > 1)
    shared = next(differ, shortest)
    return [tuple(row[shared:]) for row in rows]


def _make_inputs(formatter: Any, prompts: Sequence[str], clip: VideoClip) -> dict[str, Any]:
    """The inputs of prompts about a clip, without settings of generation."""
    request = formatter.request(prompts, videos=[clip] * len(prompts))
    return {name: value for name, value in request.items() if name not in formatter.sampling}


def _first_token(formatter: Any, word: str) -> int:
    """Return the first token of a word. Raises ValueError if it is the unknown token."""
    tokenizer = formatting.get_tokenizer(formatter.processor)
    ids: list[int] = tokenizer(word, add_special_tokens=False).input_ids
    if not ids or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"the tokenizer of {formatter.source} has no token for {word!r}, which the verdict "
            "needs; give another verifier"
        )
    return ids[0]


def _alignments(
    drafts: Sequence[DocumentDraft], clip: VideoClip, frames: Sequence[int], align: Alignment | None
) -> Tensor:  # (n,)
    named = [at for at, one in enumerate(drafts) if one.subject]
    found = torch.zeros(len(drafts), dtype=torch.float64)
    if align is not None and named:
        pictures = [to_pil_image(clip.frames[at]) for at in frames]
        found[named] = align([drafts[at].subject for at in named], pictures).double().amax(-1)
    return found
