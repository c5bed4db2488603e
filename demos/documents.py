"""Answer from retrieved documents: a small model drafts, the large one selects (speculative RAG).

    python demos/documents.py
    python demos/documents.py --model qwen2.5-vl --documents 6

Wang et al. 2025, "Speculative RAG", with pictures as documents, one in each subset. A question asks
about a thing that one picture of a store shows. The pictures whose descriptions are nearest are
retrieved; the small model answers from each of them, in one batch, and the large model reads all
answers in one forward. Two scores of it select the answer: how probable it says that the picture
shows what was asked for (self-reflection), and among the pictures near the best one the geometric
mean of its probabilities of the answer's tokens (self-containment). Lossy: the answer is one of the
small model. Whole answers are drafted, not tokens, so this is no recipe; clips and CLIP alignment
are in `mmspec.modalities.vlm.video_rag`, whose retrieval and selection are used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mmspec
from mmspec import zoo
from mmspec.cli.output import silence_libraries
from mmspec.modalities.vlm.video_rag import nearest_documents, select
from mmspec.targets.tokens.context import append_tokens
from mmspec.zoo import language

console = Console(highlight=False)
DELTA = 0.3  # of self-reflection, as in `video_rag`
ROOM = 32  # tokens of an answer


@dataclass(frozen=True)
class Case:
    """A question, and the documents that were retrieved for it."""

    question: str  # "what colour is the star?"
    support: str  # "is there a star?"
    documents: tuple[language.Example, ...]
    example: language.Example  # its facts are those of the right document


@dataclass
class Cost:
    """Facts of the answers of one way, and the forwards of the large model, prompts included."""

    name: str
    right: int = 0
    wanted: int = 0
    calls: int = 0


def main(
    model: Annotated[str, typer.Option(help="A target of `mmspec zoo list`.")] = "llava",
    questions: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 12,
    documents: Annotated[int, typer.Option(min=2, help="Retrieved per question.")] = 4,
    seed: int = 0,
) -> None:
    """Compare who writes and who selects: facts right, and forwards of the large model."""
    silence_libraries()
    torch.set_num_threads(1)
    large, processor = zoo.load(model), zoo.processor(model)
    small = zoo.load(f"{zoo.info(model).name}-drafter")
    table = Table("answers by", "selected by", "facts right", "large forwards", box=None)
    cases = make_cases(questions, documents, seed)
    for row in compare(large, small, processor, cases):
        writer, selector = row.name.split(", ")
        table.add_row(writer, selector, f"{row.right} of {row.wanted}", str(row.calls))
    console.print(table)


def make_cases(count: int, documents: int, seed: int) -> list[Case]:
    """Questions about the colour of a thing that one retrieved picture shows."""
    asked = [
        one
        for one in language.examples(40 * count, "held-out", seed, kind="question")
        if one.facts is not None and one.facts[0][0] == "colour"
    ][:count]
    store = language.examples(24 * documents, "held-out", seed + 1, kind="caption")
    cases: list[Case] = []
    for one in asked:
        name = next(
            thing.name for thing in one.scene.things if f"the {thing.name} " in f"{one.answer} "
        )
        without = [other for other in store if all(t.name != name for t in other.scene.things)]
        found = nearest_documents(*_embed(one.prompt, without), documents - 1)
        retrieved = [without[at] for at in found]
        retrieved.insert(len(cases) % documents, one)
        article = "an" if name[0] in "aeiou" else "a"
        support = f"is there {article} {name}?"
        cases.append(Case(one.prompt, support, tuple(retrieved), one))
    return cases


def _embed(question: str, store: Sequence[language.Example]) -> tuple[Tensor, Tensor]:
    """Counts of words of a question (1, W) and of the descriptions of a store (m, W)."""
    texts = [language.words(one.answer) for one in store]
    known = {word: at for at, word in enumerate(sorted({word for text in texts for word in text}))}
    counts = torch.zeros(len(texts) + 1, len(known))
    for row, text in enumerate([language.words(question), *texts]):
        for word in text:
            if word in known:
                counts[row, known[word]] += 1
    return counts[:1], counts[1:]


def compare(large: Any, small: Any, processor: Any, cases: Sequence[Case]) -> list[Cost]:
    """Three ways to answer: the small model alone, speculative RAG, and the large model alone."""
    ways = [("small, small", small, small), ("small, large", small, large)]
    ways.append(("large, large", large, large))
    rows = [Cost(name) for name, *_ in ways]
    for case in cases:
        prompts = read(processor, [case.question] * len(case.documents), case.documents)
        support = read(processor, [case.support] * len(case.documents), case.documents)
        for row, (_, writer, judge) in zip(rows, ways, strict=True):
            fast = mmspec.accelerate(writer, "plain")
            out = fast.generate(**prompts, max_new_tokens=ROOM, do_sample=False)
            answers = out.sequences[:, prompts["input_ids"].shape[1] :]
            fits = score_answers(judge, prompts, answers, _ends(writer))
            chosen = select(reflect(judge, processor, support), fits, DELTA)
            text = processor.tokenizer.decode(answers[chosen], skip_special_tokens=True)
            right, wanted = language.score(case.example, text)
            row.right, row.wanted = row.right + right, row.wanted + wanted
            row.calls += (judge is large) * 2 + (writer is large) * (1 + out.stats.target_calls)
    return rows


def read(processor: Any, questions: Sequence[str], documents: Sequence[language.Example]) -> Any:
    """One row per document, padded on the left."""
    texts = [language.format_prompt(processor, one) for one in questions]
    images = [[one.image] for one in documents]
    return dict(processor(text=texts, images=images, padding=True, return_tensors="pt"))


@torch.no_grad()
def score_answers(model: Any, prompts: Any, answers: Tensor, ends: Sequence[int]) -> Tensor:  # (n,)
    """The geometric mean of a model's probabilities of the tokens of each answer (n, T)."""
    count = answers.shape[1]
    logits = model(**append_tokens(None, prompts, answers)).logits[:, -count - 1 : -1]
    chosen = logits.double().log_softmax(-1).gather(2, answers[..., None])[..., 0]
    is_end = torch.isin(answers, torch.tensor(ends))
    counts = (is_end.cumsum(1) - is_end.long()) == 0  # to the first end
    scores: Tensor = ((chosen * counts).sum(1) / counts.sum(1)).exp()
    return scores


@torch.no_grad()
def reflect(model: Any, processor: Any, support: Any) -> Tensor:  # (n,)
    """P(yes) / (P(yes) + P(no)) of the question whether a document shows what was asked for."""
    yes, no = (processor.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    logits = model(**support).logits[:, -1].double()
    shares: Tensor = logits[:, [yes, no]].softmax(-1)
    return shares[:, 0]


def _ends(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


if __name__ == "__main__":
    typer.run(main)
