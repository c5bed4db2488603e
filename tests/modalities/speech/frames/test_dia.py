"""Dia: the tokens of its own `generate()`, with an end that passes through the books of a draft."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import DiaClassifierFreeGuidanceLogitsProcessor

import mmspec
from mmspec.decode import BrokenLogits
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Round
from mmspec.modalities.speech.frames import tiny_models
from mmspec.modalities.speech.frames.dia import DiaReader
from mmspec.modalities.speech.frames.tiny_models import BOOKS, CODES
from mmspec.targets.frames import frames as frame_targets
from mmspec.targets.frames.frame_distributions import FREE
from mmspec.targets.frames.frames import NEVER, FrameRequest, FrameTarget
from tests.covering import covering, limited

END, PAD, BEGIN = CODES, CODES + 1, CODES + 2
LATEST, STEPS = 2, 10
TEXTS = ("[S1] hello", "[S2] ab")
MARKS = {"delay_pattern": [0, 1, 2], "bos_token_id": BEGIN, "pad_token_id": PAD}
RECIPES = ("frame-plain", "frame-coupled", "frame-joint", "frame-depth", "frame-lookup")
FIND_ENDS = frame_targets.find_ends
processor: Callable[[], Any] = tiny_models.dia_processor


@cache
def model(seed: int = 2, layers: int = 2) -> Any:
    return tiny_models.dia(seed, layers)


@cache
def request(audio: bool = False) -> dict[str, Any]:
    """Two texts of different lengths, and two audio prompts of different lengths."""
    prompts = [torch.linspace(-1, 1, size).numpy() for size in (9, 20)] if audio else None
    made = processor()(
        text=list(TEXTS), audio=prompts, padding=True, eos_token_id=END, sampling_rate=1000, **MARKS
    )
    return dict(made)


def fast(recipe: str, seed: int = 2, drafter: Any = None, **parts: Any) -> mmspec.Accelerated:
    takes = mmspec.recipes.get(recipe).takes_drafter
    small = (model(seed + 1, 1) if drafter is None else drafter) if takes else None
    return mmspec.accelerate(model(seed), recipe, drafter=small, processor=processor(), **parts)


def select(given: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: one[row : row + 1] for name, one in given.items()}


def generate(seed: int, given: dict[str, Any], **how: Any) -> Any:
    usual = {"max_new_tokens": STEPS, "do_sample": False, "guidance_scale": 2.0, "top_k": 5}
    return model(seed).generate(**given, **{**usual, **how})


def tokens(one: mmspec.Accelerated, given: dict[str, Any], **how: Any) -> list[list[list[Tensor]]]:
    """The steps of every round and row."""
    usual = {"max_new_tokens": STEPS, "temperature": 0.0, "seed": 5}
    return [[[*row] for row in round_.tokens] for round_ in one.stream(**given, **{**usual, **how})]


def rows(rounds: list[list[list[Tensor]]]) -> list[list[list[int]]]:
    """All steps of each row."""
    return [[step.tolist() for part in row for step in part] for row in zip(*rounds, strict=True)]


def pad(row: list[list[int]], length: int) -> list[list[int]]:
    return row + [[PAD] * BOOKS] * (length - len(row))


@pytest.mark.parametrize(
    ("seed", "recipe", "guidance", "audio"),
    limited(covering((0, 2, 3), RECIPES, (1.0, 2.0), (False, True), strength=1), 3),
)
def test_greedy_steps_and_sound_are_those_of_generate(
    seed: int, recipe: str, guidance: float, audio: bool
) -> None:
    given = request(audio)
    made = generate(seed, given, guidance_scale=guidance)
    start = processor().get_audio_prompt_len(given["decoder_attention_mask"], **MARKS)
    one = fast(recipe, seed)
    how = {"max_new_tokens": STEPS, "temperature": 0.0, "guidance": guidance}
    rounds: list[list[list[Tensor]]] = []
    out = one.synthesize(
        **given, **how, on_round=lambda kept: rounds.append([[*row] for row in kept.tokens])
    )
    length = made.shape[1] - start
    assert [pad(row, length) for row in rows(rounds)] == made[:, start:].tolist()
    for row, waveform in enumerate(out.waveforms):
        if len(waveform):  # the processor itself decodes no empty speech
            mine = processor().batch_decode(made[row : row + 1], audio_prompt_len=start, **MARKS)
            torch.testing.assert_close(waveform, mine[0], atol=1e-5, rtol=0)
    session = one.session
    inputs, settings = session.prepare_arguments({**given, **how})
    own = session.reader.generate_audio(inputs, settings, session.codec)
    for waveform, other in zip(out.waveforms, own, strict=True):
        torch.testing.assert_close(waveform, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("recipe", "top_k"), limited(covering(RECIPES, (1, 2), strength=1), 3))
def test_codes_that_guidance_leaves_none_of_are_those_of_generate(recipe: str, top_k: int) -> None:
    """The top-k of some steps holds special codes alone: code 0, where sampling fails there."""
    made = generate(0, request(), top_k=top_k)[:, 1:].tolist()
    found = rows(tokens(fast(recipe, 0), request(), top_k=top_k, guidance=2.0))
    assert [pad(row, len(made[0])) for row in found] == made
    drawn = {"top_k": top_k, "do_sample": True, "temperature": 1.0}
    with pytest.raises(RuntimeError, match="probability tensor"):
        generate(0, request(), **drawn)
    plain = rows(tokens(fast("frame-plain", 0), request(), **drawn))
    if mmspec.recipes.get(recipe).verifier == mmspec.recipes.get("frame-plain").verifier:
        assert rows(tokens(fast(recipe, 0), request(), **drawn)) == plain
    assert all(tokens(fast(recipe, 0), request(), **drawn))


@pytest.mark.parametrize("seed", range(3))
def test_books_may_end_in_the_same_step(seed: int) -> None:
    """A second book without a delay; special codes may rank above the end."""
    marks = {**MARKS, "delay_pattern": [0, 0, 2]}
    given = processor()(text=list(TEXTS), padding=True, eos_token_id=END, **marks)
    pair = [tiny_models.dia(one, layers) for one, layers in ((seed, 2), (seed + 1, 1))]
    for one in pair:
        one.config.delay_pattern = marks["delay_pattern"]
    made = pair[0].generate(**given, max_new_tokens=STEPS, do_sample=False, top_k=7)[:, 1:].tolist()
    own = mmspec.accelerate(pair[0], "frame-coupled", drafter=pair[1], processor=processor())
    found = rows(tokens(own, dict(given), top_k=7))
    assert [pad(row, len(made[0])) for row in found] == made


def test_logits_of_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike a top-k of special codes alone."""
    read = DiaReader.read

    def read_nothing(self: DiaReader, memory: Any, frames: Tensor) -> Any:
        logits, fixed = read(self, memory, frames)
        return torch.full_like(logits, -torch.inf), fixed

    monkeypatch.setattr(DiaReader, "read", read_nothing)
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 0}):
        with pytest.raises(BrokenLogits):
            tokens(fast("frame-plain"), request(), guidance=1.0, **how)


def find_places_of_ends(seed: int, row: int, length: int) -> set[str]:
    """Where in the frames of a round speech ended, of its own accord or at the limit.

    Drafts are always right, so a round is a draft and one frame of the target.
    """
    given = select(request(), row)
    one = fast("frame-coupled", seed, model(seed), length=length)
    rounds = [round_[0] for round_ in tokens(one, given)]
    made = generate(seed, given)[0, 1:].tolist()
    assert [step.tolist() for part in rounds for step in part] == made
    at = next(step for step, frame in enumerate(made) if frame[0] == END)
    kind, found = "limit" if at == STEPS - 1 - LATEST else "own", set()
    for part in rounds:
        if 0 <= at < len(part):
            places = {0: "first", len(part) - 2: "last", len(part) - 1: "target"}
            found.add(f"{kind} {places.get(at, 'inside')}")
        at -= len(part)
    return found


def test_speech_ends_anywhere_in_a_draft() -> None:
    own = ((3, 0, 2), (2, 0, 4), (0, 0, 2), (0, 1, 2))
    limit = ((2, 1, 2), (2, 1, 4), (2, 1, 3), (2, 1, 6))
    found = [find_places_of_ends(*case) for case in (*own, *limit)]
    places = ("first", "inside", "last", "target")
    assert found == [{f"{kind} {place}"} for kind in ("own", "limit") for place in places]


def compare_distributions(seed: int, row: int, at: int, audio: bool = False, **how: Any) -> int:
    """Compare distributions with those of a sampled `generate()`, of all its steps from `at` on.

    The steps before are those of the context, the others one draft. Returns how many codes after an
    end were compared.
    """
    given = select(request(audio), row)
    how = {"do_sample": True, "temperature": 1.3, "top_p": 0.95, "top_k": 5, **how}
    records = {"output_scores": True, "return_dict_in_generate": True}
    torch.manual_seed(seed)
    made = generate(seed, given, **records, **how)
    steps = made.sequences[:, given["decoder_input_ids"].shape[1] - LATEST :]
    session = fast("frame-plain", seed).session
    inputs, settings = session.prepare_arguments({**given, **how, "max_new_tokens": STEPS})
    noise = KeyedNoise.from_seed(0, 1, torch.device("cpu"))
    target = FrameTarget(session.reader)
    verdict: Any = None
    context = target.prefill(FrameRequest(inputs, settings, noise))
    past = (tuple(steps[0, :at]),)
    start = Round(0, (0,), (0,), ((),), (True,), past, (False,), verdict, calls=0)
    context = target.keep(context, context.empty_draft(), start)
    scores = target.score(context, Draft.chain(steps[:, at:-1], Kind.DET))
    found: Any = scores.distribution
    certain = 0
    for node, step in enumerate(range(at, steps.shape[1])):
        for book in range(BOOKS):
            fixed = int(found.fixed[0, node, book])
            code, ended = int(steps[0, step, book]), END in steps[0, :step, book].tolist()
            probs = found.codes.probs[0, node, book]
            if fixed != FREE:
                probs = torch.eye(len(probs))[fixed]
            if ended or step < book:  # padding, or a code of the prompt: not of the scores
                assert fixed == code
            else:
                wanted = made.scores[step][book].softmax(-1)
                torch.testing.assert_close(probs, wanted, atol=1e-5, rtol=0)
            certain += ended
    return certain


SAMPLED = covering((0, 1, 2, 3), (0, 1), (1, 2), (False, True))


@pytest.mark.parametrize(("seed", "row", "at", "audio"), SAMPLED)
def test_distributions_are_those_of_generate(seed: int, row: int, at: int, audio: bool) -> None:
    for how in ({}, {"top_p": 1.0, "temperature": 1.0}):
        assert compare_distributions(seed, row, at, audio, **how) > 0


def ignore_ends(self: Any, since: Tensor) -> Tensor:
    return torch.full((*since.shape, BOOKS), FREE)


def find_ends_of_context(reader: Any, before: Tensor, frames: Tensor, steps: Tensor) -> Tensor:
    return before[:, None].expand(-1, frames.shape[1] + 1)


def find_ends_of_all_rows(reader: Any, before: Tensor, frames: Tensor, steps: Tensor) -> Tensor:
    return FIND_ENDS(reader, before.amin().expand_as(before), frames, steps)


class RememberedEnds:
    """Ends as a processor with a state keeps them, those of drafts that were rejected included."""

    least = NEVER

    def __call__(self, reader: Any, before: Tensor, frames: Tensor, steps: Tensor) -> Tensor:
        found = FIND_ENDS(reader, before, frames, steps)
        self.least = min(self.least, int(found.min()))
        return found.clamp_max(self.least)


def guide_without_top_k(self: Any, settings: Any) -> Any:
    return DiaClassifierFreeGuidanceLogitsProcessor(settings.guidance, self.size)


WRONG: dict[str, tuple[Any, str, Any]] = {
    "the end passes through no book": (DiaReader, "ended_codes", ignore_ends),
    "the end of a draft is not seen": (frame_targets, "find_ends", find_ends_of_context),
    "guidance has no top-k": (DiaReader, "_guidance", guide_without_top_k),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_ends_and_guidance_are_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: the comparison of distributions fails."""
    how: dict[str, Any] = {"top_p": 1.0, "temperature": 1.0, "top_k": 4}
    assert compare_distributions(2, 0, 1, **how) > 0
    monkeypatch.setattr(*WRONG[case])
    with pytest.raises(AssertionError):
        compare_distributions(2, 0, 1, **how)


@pytest.mark.parametrize(
    ("wrong", "drafter"),
    [(find_ends_of_context, 2), (find_ends_of_all_rows, 2), (RememberedEnds(), 4)],
    ids=["of the context alone", "of another row", "of a rejected draft"],
)
def test_ends_of_wrong_paths_are_found(
    wrong: Any, drafter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls: greedy speech is no longer that of `generate()`, or has codes that are no codes."""
    made = generate(2, request())[:, 1:].tolist()

    def compare() -> None:
        found = rows(tokens(fast("frame-coupled", 2, model(drafter)), request()))
        assert [pad(row, len(made[0])) for row in found] == made

    compare()
    monkeypatch.setattr(frame_targets, "find_ends", wrong)
    with pytest.raises((AssertionError, IndexError)):
        compare()


WARPS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_k": 4, "top_p": 0.8},
    {"temperature": 1.2, "guidance": 1.0, "top_k": 0},
)


@pytest.mark.parametrize(
    ("seed", "recipe", "given", "audio"),
    limited(
        covering((0, 2), ("frame-coupled", "frame-lookup"), WARPS, (False, True), strength=1), 2
    ),
    ids=str,
)
def test_a_seed_gives_what_plain_decoding_gives(
    seed: int, recipe: str, given: dict[str, Any], audio: bool
) -> None:
    plain = rows(tokens(fast("frame-plain", seed), request(audio), **given))
    assert rows(tokens(fast(recipe, seed), request(audio), **given)) == plain
    for row in range(2):  # alone, under its own number
        alone = {**select(request(audio), row), "row_ids": [row]}
        assert rows(tokens(fast(recipe, seed), alone, **given)) == [plain[row]]


def test_drafts_of_the_model_itself_are_all_accepted() -> None:
    for recipe in ("frame-coupled", "frame-joint", "frame-depth"):
        out = fast(recipe, 2, model(2)).synthesize(**request(), max_new_tokens=STEPS, seed=3)
        assert out.stats.target_calls == -(-(STEPS - 1) // 4)


@pytest.mark.parametrize("seed", [0, 2])  # speech that ends of its own accord, at the limit
def test_a_stream_plays_verified_frames_alone(seed: int) -> None:
    one = fast("frame-coupled", seed, model(seed))
    how = {"max_new_tokens": STEPS, "temperature": 1.0, "seed": 5}
    heard = [torch.zeros(0)] * 2
    for kept in one.stream(**request(), **how):
        now = kept.partial()
        for before, after in zip(heard, now, strict=True):
            assert torch.allclose(after[: len(before)], before, atol=1e-5)
        heard = now
    out = one.synthesize(**request(), **how)
    assert any(len(row[0]) == STEPS - LATEST - 1 for row in out.codes) == (seed == 2)
    for mine, wanted in zip(heard, out.waveforms, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-5)
