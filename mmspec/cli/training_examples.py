"""Training examples of `mmspec train`: questions of a data set and their answers."""

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
from mmspec.cli.options import parse_pairs
from mmspec.modality import Teacher
from mmspec.recipe import Recipe
from mmspec.targets.readers.reader import Reader
from mmspec.training.conversations import Question
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.fitting import TrainingProgress
from mmspec.training.head_trainer import ShuffledBatches
from mmspec.training.heads import TrainingExample, cache_outputs
from mmspec.training.packing import measure_padding
from mmspec.training.prefixes import PrefixReader
from mmspec.training.processes import Processes
from mmspec.training.responses import Response, concatenate_tokens

MIN_TOKENS = 2  # of an answer: its first token comes from the prefill


@dataclass(frozen=True)
class ResponseOptions:
    """Whose answers are trained on, and how long they may be."""

    from_data: bool  # the answers of the data; else those of the target
    max_new_tokens: int
    max_length: int  # tokens of question and answer
    temperature: float
    seed: int


class ResponseCollector:
    """Collects answers from the target, or those of the data."""

    def __init__(
        self,
        model: Any,
        teacher: Teacher,
        settings: ResponseOptions,
        prefixes: PrefixReader | None = None,
    ) -> None:
        self.plain, self.teacher, self.settings = accelerate(model, "plain"), teacher, settings
        self.prefixes = PrefixReader(teacher) if prefixes is None else prefixes

    def __call__(self, questions: Sequence[tuple[int, Question]]) -> list[Response]:
        """One response per question, in order; unusable ones have a reason (`skipped`)."""
        found: dict[int, Response] = {}
        media: dict[int, Any] = {}
        for number, question in questions:
            if self.settings.from_data and question.answer is None:
                found[number] = Response(number, skipped=f"{question.place} has no answer")
                continue
            try:
                media[number] = self.teacher.load_media(question)
            except ValueError as error:
                found[number] = Response(number, skipped=str(error))
        for kinds in sorted({one.media_kinds for _, one in questions}):
            own = [
                (number, question)
                for number, question in questions
                if number in media and question.media_kinds == kinds
            ]
            for one in self._respond(own, media):
                found[one.question] = one
        return [found[number] for number, _ in questions]

    def _respond(
        self, questions: Sequence[tuple[int, Question]], media: dict[int, Any]
    ) -> Iterator[Response]:
        """Responses to questions with the same kinds of media."""
        if not questions:
            return
        max_length, inputs = self.settings.max_length, self._inputs(questions, media)
        lengths = inputs["attention_mask"].sum(-1).tolist()
        short = [
            pair
            for pair, size in zip(questions, lengths, strict=True)
            if reason_to_skip(pair[1], size, max_length) is None
        ]
        for (number, question), size in zip(questions, lengths, strict=True):
            reason = reason_to_skip(question, size, max_length)
            if reason is not None:
                yield Response(number, size, skipped=reason)
        if not short:
            return
        if len(short) < len(questions):
            inputs = self._inputs(short, media)
        answers = (
            self._tokenize(short)
            if self.settings.from_data
            else self._generate(short, media, inputs)
        )
        sizes = inputs["attention_mask"].sum(-1).tolist()
        for (number, question), size, tokens in zip(short, sizes, answers, strict=True):
            if size + len(tokens) > max_length and self.settings.from_data:
                total = size + len(tokens)
                reason = f"{question.place} has {total} tokens; --max-length is {max_length}"
                yield Response(number, size, skipped=reason)
            elif len(tokens) < MIN_TOKENS:
                reason = (
                    f"the answer to {question.place} has {len(tokens)} tokens: nothing to draft"
                )
                yield Response(number, size, skipped=reason)
            else:
                yield Response(number, size, tuple(tokens[: max_length - size]))

    def _inputs(self, questions: Sequence[tuple[int, Question]], media: dict[int, Any]) -> Any:
        return self.teacher.inputs(
            [one for _, one in questions], [media[at] for at, _ in questions]
        )

    def _tokenize(self, questions: Sequence[tuple[int, Question]]) -> list[list[int]]:
        return [self.teacher.tokens(question.answer or "") for _, question in questions]

    def _generate(
        self, questions: Sequence[tuple[int, Question]], media: dict[int, Any], inputs: Any
    ) -> list[list[int]]:
        """Answers of the target; prompts of one conversation are read once."""
        opened = [media[number] for number, _ in questions]
        shared = self.prefixes.share([one for _, one in questions], opened, inputs)
        if shared is None:
            return self._decode(questions, inputs)
        own = [questions[row] for row in shared.rows]
        answers = self._decode(own, shared.inputs, past_key_values=shared.past.cache)
        found = {number: one for (number, _), one in zip(own, answers, strict=True)}
        rest = [one for one in questions if one[0] not in found]
        if rest:
            answers = self._decode(rest, self._inputs(rest, media))
            found |= {number: one for (number, _), one in zip(rest, answers, strict=True)}
        return [found[number] for number, _ in questions]

    def _decode(
        self, questions: Sequence[tuple[int, Question]], inputs: Any, **more: Any
    ) -> list[list[int]]:
        """Answers of the target; the noise of a row follows from its number."""
        settings = self.settings
        sampling: dict[str, Any] = {"do_sample": settings.temperature > 0, **more}
        if settings.temperature > 0:
            sampling["temperature"] = settings.temperature
        rows, max_new_tokens = [number for number, _ in questions], settings.max_new_tokens
        seeded = {"seed": settings.seed, "row_ids": rows}
        out = self.plain.generate(**inputs, **sampling, **seeded, max_new_tokens=max_new_tokens)
        new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        return [cut_at_end(row, self.teacher.end_ids) for row in new]


def reason_to_skip(question: Question, size: int, max_length: int) -> str | None:
    """Why a prompt of `size` tokens is not answered."""
    if size + MIN_TOKENS <= max_length:
        return None
    return f"{question.place} has {size} tokens; --max-length is {max_length}"


def cut_at_end(tokens: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Tokens up to the first end token, with it."""
    last = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: last + 1])


def select_held_out(questions: Sequence[Question], count: int, seed: int) -> frozenset[int]:
    """About `count` questions, at max_length a fifth, to hold out; those of a row stay together."""
    rows = sorted({one.row for one in questions})
    size = min(count, max(1, len(questions) // 5))
    found: list[int] = []
    for row in np.random.default_rng((seed, 1)).permutation(rows).tolist():
        if len(found) >= size:
            break
        found += [at for at, one in enumerate(questions) if one.row == row]
    return frozenset(found)


class TrainingExamples:
    """Training examples made of answers, in batches that their number determines."""

    def __init__(
        self,
        teacher: Teacher,
        questions: Sequence[Question],
        answers: Sequence[Response],
        batch: int,
        seed: int,
        cache: FeatureCache | None = None,
        pack: int | None = None,
        prefixes: PrefixReader | None = None,
    ) -> None:
        self.teacher, self.questions, self.answers = teacher, questions, answers
        self.cache, self.pack = cache, pack
        self.prefixes = PrefixReader(teacher) if prefixes is None else prefixes
        sizes = [one.prompt + len(one.tokens) for one in answers]
        sorts = [questions[one.question].media_kinds for one in answers]
        self.shuffle = ShuffledBatches(sizes, sorts, batch, seed)

    def example_makers(self, step: int, accumulate: int) -> list[Callable[[], TrainingExample]]:
        """Functions that make the examples of a step."""
        first = step * accumulate
        return [partial(self.at, number) for number in range(first, first + accumulate)]

    def at(self, number: int) -> TrainingExample:
        """The example of batch `number`; with cached rows, of token ids without images."""
        return self._example(self.shuffle.at(number))

    def _example(self, answers: Sequence[int]) -> TrainingExample:
        chosen = [self.answers[at] for at in answers]
        keys, device = [one.question for one in chosen], self.teacher.reader.device
        ids = None if self.cache is None else self.cache.prompt_ids(keys)
        if ids is None:
            questions = [self.questions[one] for one in keys]
            media = [self.teacher.load_media(one) for one in questions]
            inputs = self.teacher.inputs(questions, media)
        else:
            inputs = {"input_ids": ids.to(device)}
        width = max(len(one.tokens) for one in chosen)
        rows = [[*one.tokens, *[-1] * (width - len(one.tokens))] for one in chosen]
        tokens = torch.tensor(rows, device=device)
        return TrainingExample(inputs, tokens, self.cache, keys, self.pack)

    def padding(self) -> tuple[float, float]:
        """Mean tokens of a batch without padding, and the share of padding over an epoch."""
        batches = [[self.answers[at] for at in one] for one in self.shuffle.batches]
        sizes = [[(one.prompt, len(one.tokens)) for one in rows] for rows in batches]
        return measure_padding(sizes, self.pack)

    def cache_features(
        self, tap: str, batches: int, processes: Processes, progress: TrainingProgress
    ) -> None:
        """Cache the target's features of the first batches; all rows are in those of one epoch."""
        if (cache := self.cache) is None:
            return
        count = min(batches, len(self.shuffle.batches))
        chosen = [self.shuffle.at(number) for number in range(count)]
        keys = [self.questions[one.question] for one in self.answers]
        turns, others = group_turns(chosen, [(one.row, one.media_kinds) for one in keys])
        asked = [[self.answers[at].question for at in one] for one in (*turns, *others)]

        def read(number: int) -> None:
            if number >= len(turns):
                example = self._example(others[number - len(turns)])
                return cache_outputs(self.teacher.reader, example, tap)
            questions = [self.questions[at] for at in asked[number]]
            media = [self.teacher.load_media(one) for one in questions]
            tokens = [self.answers[at].tokens for at in turns[number]]
            for rows, found in self.prefixes.read(questions, media, tokens, tap):
                cache.add([asked[number][row] for row in rows], found, tap)
            return None

        cache.fill(asked, read, tap, processes, progress)

    def counts(self) -> torch.Tensor:  # (V,) int64
        """How often each token occurs in the answers."""
        tokens = concatenate_tokens(self.answers)
        return torch.bincount(tokens, minlength=self.teacher.reader.vocabulary)


def group_turns(
    batches: Sequence[Sequence[int]], conversations: Sequence[Any]
) -> tuple[list[list[int]], list[list[int]]]:
    """Batches of whole conversations of several answers, and the batches of the others.

    `conversations` has a key per answer.
    """
    known: dict[Any, list[int]] = {}
    for at in sorted(at for one in batches for at in one):
        known.setdefault(conversations[at], []).append(at)
    size, turns = max(map(len, batches), default=1), list[list[int]]()
    for (_, kind), own in sorted(known.items(), key=lambda one: (one[0][1], one[0][0])):
        if len(own) == 1:
            continue
        last = turns[-1] if turns else []
        if last and conversations[last[0]][1] == kind and len(last) + len(own) <= size:
            last += own
        else:
            turns.append(list(own))
    others = [[at for at in one if len(known[conversations[at]]) == 1] for one in batches]
    return turns, [one for one in others if one]


def measure_coverage(head: Any, answers: Sequence[Response]) -> float | None:
    """The share of tokens that are in a head's draft vocabulary; None if that is all of them."""
    mask = dict(head.named_buffers()).get("t2d")
    tokens = concatenate_tokens(answers)
    if mask is None or not len(tokens):
        return None
    return float(mask.cpu()[tokens].float().mean())


def measure_acceptance(
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
    fast.warned = True  # no warning about an untrained head
    steps = accepted = 0
    for kinds in sorted({one.media_kinds for one in questions}):
        own = [one for one in questions if one.media_kinds == kinds]
        for start in range(0, len(own), batch):
            group = own[start : start + batch]
            inputs = teacher.inputs(group, [teacher.load_media(one) for one in group])
            out = fast.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
            steps += out.stats.num_spec_steps
            accepted += out.stats.num_accepted_draft_tokens
    return 1 + accepted / max(steps, 1)


def initial_head(
    recipe: Recipe,
    reader: Reader,
    counts: torch.Tensor,
    head: Path | None,
    overrides: Sequence[str],
    seed: int,
) -> Any:
    """An untrained head, its configuration changed by NAME=VALUE, or the head in a folder.

    `counts` (V,) int64 are token counts of the training data. Raises ValueError for another model.
    """
    assert recipe.training is not None
    changes = parse_pairs(list(overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if head is None:
            made = recipe.training.begin(reader, counts, **changes)
            _check_changes(changes, type(made.config))
            return made
        return recipe.training.load(head, recipe.draft_model, reader, **changes)


def _check_changes(changes: Mapping[str, Any], kind: type) -> None:
    """Refuse names that are no part of the configuration. Raises ValueError."""
    known = [*(one.name for one in fields(kind)), *vars(kind).get("attribute_map", ())]
    unknown = [name for name in changes if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; drop it"
        raise ValueError(f"--set {unknown[0]}: a {kind.__name__} has no such part{hint}")
