"""What a head is taught of: questions of a data set, the answers to them, and those held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmspec.api import accelerate
from mmspec.cli.options import set_pairs
from mmspec.modality import Teacher
from mmspec.recipe import Recipe
from mmspec.targets.readers.reader import Reader
from mmspec.training.answers import TaughtAnswer
from mmspec.training.conversations import Question
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.head_trainer import Shuffle
from mmspec.training.heads import Lesson

LEAST = 2  # tokens of an answer: the target says the first one itself


@dataclass(frozen=True)
class AnswerSettings:
    """Whose answers are learnt, and how long they may be."""

    own: bool  # the data's own; else the target's
    max_new_tokens: int
    max_length: int  # tokens of question and answer
    temperature: float
    seed: int


class Answering:
    """Answers questions by the target, or takes the data's own answers."""

    def __init__(self, model: Any, teacher: Teacher, settings: AnswerSettings) -> None:
        self.plain, self.teacher, self.settings = accelerate(model, "plain"), teacher, settings

    def __call__(self, asked: Sequence[tuple[int, Question]]) -> list[TaughtAnswer]:
        """One line for each, in their order; what cannot be learnt is left out with its reason."""
        found: dict[int, TaughtAnswer] = {}
        opened: dict[int, Any] = {}
        for number, question in asked:
            if self.settings.own and question.answer is None:
                found[number] = TaughtAnswer(number, skipped=f"{question.place} has no answer")
                continue
            try:
                opened[number] = self.teacher.load_media(question)
            except ValueError as error:
                found[number] = TaughtAnswer(number, skipped=str(error))
        for has_pictures in (False, True):
            own = [
                (number, question)
                for number, question in asked
                if number in opened and bool(question.pictures) is has_pictures
            ]
            for one in self._answered(own, opened):
                found[one.question] = one
        return [found[number] for number, _ in asked]

    def _answered(
        self, asked: Sequence[tuple[int, Question]], opened: dict[int, Any]
    ) -> Iterator[TaughtAnswer]:
        """Those of one sort, without what is too long."""
        if not asked:
            return
        most, inputs = self.settings.max_length, self._inputs(asked, opened)
        lengths = inputs["attention_mask"].sum(-1).tolist()
        short = [pair for pair, size in zip(asked, lengths, strict=True) if size + LEAST <= most]
        for (number, question), size in zip(asked, lengths, strict=True):
            if size + LEAST > most:
                why = f"{question.place} has {size} tokens; --max-length is {most}"
                yield TaughtAnswer(number, size, skipped=why)
        if not short:
            return
        if len(short) < len(asked):
            inputs = self._inputs(short, opened)
        said = self._own(short) if self.settings.own else self._said(short, inputs)
        sizes = inputs["attention_mask"].sum(-1).tolist()
        for (number, question), size, tokens in zip(short, sizes, said, strict=True):
            if size + len(tokens) > most and self.settings.own:
                why = f"{question.place} has {size + len(tokens)} tokens; --max-length is {most}"
                yield TaughtAnswer(number, size, skipped=why)
            elif len(tokens) < LEAST:
                why = f"the answer to {question.place} has {len(tokens)} tokens: nothing to draft"
                yield TaughtAnswer(number, size, skipped=why)
            else:
                yield TaughtAnswer(number, size, tuple(tokens[: most - size]))

    def _inputs(self, asked: Sequence[tuple[int, Question]], opened: dict[int, Any]) -> Any:
        return self.teacher.inputs([one for _, one in asked], [opened[at] for at, _ in asked])

    def _own(self, asked: Sequence[tuple[int, Question]]) -> list[list[int]]:
        return [self.teacher.tokens(question.answer or "") for _, question in asked]

    def _said(self, asked: Sequence[tuple[int, Question]], inputs: Any) -> list[list[int]]:
        """What the target says, each row by noise of its own."""
        settings = self.settings
        how: dict[str, Any] = {"do_sample": settings.temperature > 0}
        if settings.temperature > 0:
            how["temperature"] = settings.temperature
        rows, room = [number for number, _ in asked], settings.max_new_tokens
        seeded = {"seed": settings.seed, "row_ids": rows}
        out = self.plain.generate(**inputs, **how, **seeded, max_new_tokens=room)
        new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        return [cut(row, self.teacher.ends) for row in new]


def cut(tokens: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Tokens up to the first that ends, with it."""
    last = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: last + 1])


def held_out(questions: Sequence[Question], count: int, seed: int) -> frozenset[int]:
    """About `count` questions, at most a fifth, that are not learnt; a row's stay together."""
    rows = sorted({one.row for one in questions})
    wanted = min(count, max(1, len(questions) // 5))
    found: list[int] = []
    for row in np.random.default_rng((seed, 1)).permutation(rows).tolist():
        if len(found) >= wanted:
            break
        found += [at for at, one in enumerate(questions) if one.row == row]
    return frozenset(found)


class Lessons:
    """Lessons out of answers, a batch at a time; of a number follows what is in it."""

    def __init__(
        self,
        teacher: Teacher,
        questions: Sequence[Question],
        answers: Sequence[TaughtAnswer],
        batch: int,
        seed: int,
        cache: FeatureCache | None = None,
    ) -> None:
        self.teacher, self.questions, self.answers = teacher, questions, answers
        self.cache = cache
        sizes = [one.prompt + len(one.tokens) for one in answers]
        sorts = [bool(questions[one.question].pictures) for one in answers]
        self.shuffle = Shuffle(sizes, sorts, batch, seed)

    def makers(self, step: int, accumulate: int) -> list[Callable[[], Lesson]]:
        """What makes the lessons of a step."""
        first = step * accumulate
        return [partial(self.at, number) for number in range(first, first + accumulate)]

    def at(self, number: int) -> Lesson:
        """The lesson of a batch."""
        chosen = [self.answers[at] for at in self.shuffle.at(number)]
        asked = [self.questions[one.question] for one in chosen]
        inputs = self.teacher.inputs(asked, [self.teacher.load_media(one) for one in asked])
        width = max(len(one.tokens) for one in chosen)
        rows = [[*one.tokens, *[-1] * (width - len(one.tokens))] for one in chosen]
        tokens = torch.tensor(rows, device=self.teacher.reader.device)
        return Lesson(inputs, tokens, self.cache, [one.question for one in chosen])

    def counts(self) -> torch.Tensor:  # (V,) int64
        """How often each token is said."""
        said = torch.tensor([token for one in self.answers for token in one.tokens])
        return torch.bincount(said, minlength=self.teacher.reader.vocabulary)


def acceptance(
    model: Any,
    recipe: Recipe,
    head: Any,
    teacher: Teacher,
    questions: Sequence[Question],
    batch: int,
    max_new_tokens: int,
) -> float:
    """Mean acceptance length of a head over questions, greedy: 1 + accepted drafts per round."""
    assert recipe.training is not None
    fast = accelerate(model, recipe, **recipe.training.parts(head))
    fast.warned = True  # a head that has learnt nothing yet is no news
    steps = accepted = 0
    for has_pictures in (False, True):
        own = [one for one in questions if bool(one.pictures) is has_pictures]
        for start in range(0, len(own), batch):
            asked = own[start : start + batch]
            inputs = teacher.inputs(asked, [teacher.load_media(one) for one in asked])
            out = fast.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
            steps += out.stats.num_spec_steps
            accepted += out.stats.num_accepted_draft_tokens
    return 1 + accepted / max(steps, 1)


def check_pictures(questions: Sequence[Question], images: Path | None) -> None:
    """Refuse data whose pictures all lie elsewhere. Raises ValueError naming the first."""
    named = {picture for one in questions for picture in one.pictures}
    if named and not any(picture.is_file() for picture in named):
        first = next(picture for one in questions for picture in one.pictures)
        where = "another folder" if images else "the folder they lie in"
        raise ValueError(
            f"none of the {len(named)} pictures of the data is there (the first is {first}); give "
            f"--images {where}"
        )


def beginning(
    recipe: Recipe,
    reader: Reader,
    counts: torch.Tensor,
    head: Path | None,
    knobs: Sequence[str],
    seed: int,
) -> Any:
    """An untrained head with its configuration changed by NAME=VALUE, or the one in a folder.

    `counts` (V,) int64 are of the tokens in what is taught. Raises ValueError for what is none.
    """
    assert recipe.training is not None
    changes = set_pairs(list(knobs))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if head is None:
            made = recipe.training.begin(reader, counts, **changes)
            _check_changes(changes, type(made.config))
            return made
        return recipe.training.opened(head, recipe.draft_model, reader, **changes)


def _check_changes(changes: Mapping[str, Any], kind: type) -> None:
    """Refuse what a configuration would keep and no head look at. Raises ValueError."""
    known = [*(one.name for one in fields(kind)), *vars(kind).get("attribute_map", ())]
    unknown = [name for name in changes if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; drop it"
        raise ValueError(f"--set {unknown[0]}: a {kind.__name__} has no such part{hint}")
