"""The zoo's speech: how it is learnt, and that its checkpoints speak and are drafted for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec import zoo
from mmspec.modalities.speech import recognition, utterances
from mmspec.modalities.speech.codecs import load_codec
from mmspec.modalities.speech.recordings import recordings
from mmspec.modalities.speech.sentences import held_out_sentences, sentence
from mmspec.modalities.speech.utterances import ZOO_VOICES, cycle_speakers
from mmspec.models.heads.multi_token import MultiTokenHeads, MultiTokenHeadsConfig
from mmspec.training.fitting import CosineDecay, TrainingRun
from tools.zoo.speech.synthesis import models
from tools.zoo.speech.synthesis.codec import HOP, build_codec
from tools.zoo.speech.synthesis.codec_training import (
    FRAMES,
    CodecInput,
    extract_inputs,
    log_mel,
    sample_crops,
    spectral_distance,
    train_codec,
)
from tools.zoo.speech.synthesis.evaluate import word_error_rate
from tools.zoo.speech.synthesis.language_model_training import (
    IGNORED,
    CorpusUtterance,
    assign_words,
    batches,
    encode_codes,
    make_rows,
    speech_loss,
    train_speech_model,
)
from tools.zoo.speech.synthesis.multi_token_training import multi_token_losses, train_jointly
from tools.zoo.speech.synthesis.streaming_codec import (
    STREAMING_CODEC,
    DecoderExample,
    build_streaming_codec,
    sample_examples,
    train_streaming_codec,
)
from tools.zoo.speech.synthesis.train import head_examples

torch.set_num_threads(1)

TINY = models.ModelSize(1, 16, 32, 2)
HOW: dict[str, Any] = {"temperature": 0.8, "seed": 3}


@lru_cache(maxsize=1)
def recorded() -> list[CodecInput]:
    return extract_inputs([one.waveform() for one in recordings()[:3]])


# --- learning -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_codec_learns_to_give_back_what_it_hears() -> None:
    model, losses = build_codec(), list[float]()
    course = TrainingRun(progress=lambda *seen: losses.append(seen[3]))
    train_codec(model, sample_crops(recorded(), 2, 0), CosineDecay(12, 2e-3), course)
    assert losses[-1] < 0.8 * losses[0]
    assert not model.training
    assert len({code for one in recorded() for code in encode_codes(model, one)}) > 8


def test_codes_are_those_of_the_whole_encoder() -> None:
    """What training leaves out, the branch that reads samples, says nothing in a trained codec."""
    made = load_codec(zoo.path("codec-lm") / "codec")
    one = recorded()[0]
    with torch.no_grad():
        whole = made.model.encode(one.waves[None, None], one.features[None]).audio_codes
    assert encode_codes(made.model, one) == whole[0, 0].tolist()


def test_crops_keep_sound_and_features_together() -> None:
    batch = next(sample_crops(recorded(), 4, 0))
    assert batch.waves.shape == (4, FRAMES * HOP)
    loud = batch.waves.view(4, FRAMES, HOP).square().mean(-1).add(1e-6).log10()
    heard_loud = batch.features.mean(-1)
    for mine, other in zip(loud, heard_loud, strict=True):
        assert float(torch.corrcoef(torch.stack((mine, other)))[0, 1]) > 0.6


def make_examples(count: int = 20) -> Any:
    utterances = [
        CorpusUtterance(text, voice, torch.zeros(0))
        for text, voice in zip(held_out_sentences(count), cycle_speakers(count), strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randint(1024, (5 + row % 4,), generator=generator) for row in range(count)]
    return utterances, make_rows(utterances, [row.tolist() for row in codes])


def test_only_speech_and_its_end_are_learnt() -> None:
    utterances, pool = make_examples()
    where = models.speech_layout()
    assert pool[1].prompt[0] == where.voices["ada"]
    assert pool[1].prompt[-1] == where.begin
    assert models.tokenizer().decode(pool[1].prompt[1:-1]) == utterances[1].text
    batch = next(batches(pool, 4, 0))
    assert {*batch.ids[batch.labels != IGNORED].tolist()} == {
        *batch.labels[batch.labels != IGNORED].tolist()
    }
    assert int((batch.labels == where.end).sum()) == 4
    assert bool((batch.labels[batch.labels != IGNORED] != where.begin).all())


def test_lessons_pad_prompts_on_the_left_and_speech_on_the_right() -> None:
    _, pool = make_examples()
    lesson = next(head_examples(pool, 4, 0))
    mask = lesson.inputs["attention_mask"]
    assert bool((mask[:, -1] == 1).all())
    assert bool((mask.diff(dim=1) >= 0).all())
    assert bool((lesson.inputs["input_ids"][:, -1] == models.speech_layout().begin).all())
    ended = [row[row >= 0][-1] for row in lesson.tokens]
    assert all(int(last) == models.speech_layout().end for last in ended)


@pytest.mark.parametrize("named", [0.0, 1.0])
def test_a_model_learns_to_speak(named: float) -> None:
    model = models.build_model(TINY)
    _, pool = make_examples()
    held = next(batches(pool, 4, 1))
    before = float(speech_loss(model, held).detach())
    train_speech_model(model, batches(pool, 4, 0), CosineDecay(30, 5e-3), TrainingRun(), named)
    assert float(speech_loss(model, held).detach()) < before - 0.5


def test_a_word_lasts_as_long_as_its_letters() -> None:
    """Five frames of silence, then 3 : 6 of what is said, then ten of silence."""
    assert assign_words(["it", "turns"], 15 + 9) == [0] * (5 + 3) + [1] * (6 + 10)
    _, pool = make_examples()
    batch = next(batches(pool, 4, 0))
    named = batch.words[batch.words[..., 0] != IGNORED]
    assert len(named) == int((batch.labels >= models.speech_layout().first).sum())
    assert bool((named[:, 0] != named[:, 1]).all())


# --- checkpoints ----------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def speaking(recipe: str, drafter: str | None = None, **parts: Any) -> mmspec.Accelerated:
    named = None if drafter is None else f"zoo:{drafter}"
    return mmspec.accelerate("zoo:codec-lm", recipe, drafter=named, **parts)


@lru_cache(maxsize=8)
def synthesize_text(recipe: str, drafter: str | None = None, **parts: Any) -> Any:
    out = speaking(recipe, drafter, **parts).synthesize(
        held_out_sentences(2), voice=cycle_speakers(2), **HOW
    )
    assert out.stats.fallback is None
    return out


def codes(out: Any) -> list[Any]:
    return [row.tolist() for row in out.codes]


@pytest.mark.parametrize(
    ("recipe", "drafter", "parts"),
    [
        pytest.param("coupled", "codec-lm-drafter", {"length": 3}, marks=pytest.mark.exhaustive),
        *(
            pytest.param("coupled", "codec-lm-heads", shape, marks=pytest.mark.exhaustive)
            for shape in ({"length": 4}, {"tree": (3, 2, 1)})
        ),
        ("codec-mtp", "codec-lm-heads", {"verifier": "coupled"}),
    ],
    ids=str,
)
def test_what_drafts_leaves_speech_as_it_is_and_saves_calls(
    recipe: str, drafter: str, parts: dict[str, Any]
) -> None:
    plain, fast = synthesize_text("plain"), synthesize_text(recipe, drafter, **parts)
    assert codes(fast) == codes(plain)
    assert fast.stats.target_calls < 0.8 * plain.stats.target_calls


def test_blocks_save_half_of_the_calls() -> None:
    fast = synthesize_text("codec-mtp", "codec-lm-heads")
    assert not fast.stats.exact
    per_row = fast.stats.num_new_tokens / 2
    assert fast.stats.target_calls <= per_row / 2


@pytest.mark.exhaustive
def test_blocks_are_the_target_s_where_it_was_trained_with_its_heads() -> None:
    """What is kept unverified differs far less from what the target would choose."""
    masses = []
    for target in ("codec-lm-mtp", "codec-lm"):
        fast = mmspec.accelerate(f"zoo:{target}", "codec-mtp", drafter=f"zoo:{target}-heads", n=2)
        fast.synthesize(held_out_sentences(2), voice=cycle_speakers(2), **HOW)
        assert fast.last_stats is not None
        masses.append(fast.last_stats.over_accepted_mass or 1.0)
    together, frozen = masses
    assert together < 0.5 * frozen


@pytest.mark.exhaustive
def test_heads_trained_with_their_target_save_half_of_its_calls_exactly() -> None:
    texts, given = held_out_sentences(2), {"voice": cycle_speakers(2), **HOW}
    drafts = {"drafter": "zoo:codec-lm-mtp-heads"}
    plain, fast = (
        mmspec.accelerate("zoo:codec-lm-mtp", name, **parts).synthesize(texts, **given)
        for name, parts in (("plain", {}), ("speech-llama-mtp", drafts))
    )
    assert codes(plain) == codes(fast)
    assert fast.stats.target_calls < 0.6 * plain.stats.target_calls


@pytest.mark.exhaustive
def test_a_target_learns_together_with_its_heads() -> None:
    model, losses = models.build_model(TINY), list[float]()
    _, pool = make_examples()
    shape = MultiTokenHeadsConfig.of(model.config, model.config.vocab_size, num_heads=2)
    heads, batch = MultiTokenHeads(shape), next(batches(pool, 4, 0))
    first = multi_token_losses(model, heads, batch)
    assert len(first) == 3
    speech = speech_loss(model, batch)
    torch.testing.assert_close(first[0], speech)
    course = TrainingRun(progress=lambda *seen: losses.append(seen[3]))
    train_jointly(model, heads, batches(pool, 4, 0), CosineDecay(30, 1e-2), course)
    assert losses[-1] < 0.9 * losses[0]
    last = multi_token_losses(model, heads, batch)
    assert all(bool(after < before) for before, after in zip(first, last, strict=True))


@pytest.mark.exhaustive
def test_sentences_end_and_voices_differ() -> None:
    out = synthesize_text("plain")
    for row in out.codes:
        assert 30 < row.shape[1] < models.MAX_POSITIONS - 60
        assert 0 <= int(row.min()) <= int(row.max()) < models.speech_layout().count
    one = speaking("plain")
    mine, other = (one.synthesize(held_out_sentences(1), voice=name, **HOW) for name in ZOO_VOICES)
    assert codes(mine) != codes(other)


def test_the_codec_gives_back_voices_it_never_heard() -> None:
    """Distance of log-mels, in nats, of bundled recordings; codes in another order are far off."""
    made = load_codec(zoo.path("codec-lm") / "codec")
    apart, shuffled = [], []
    for one in recorded():
        found = torch.tensor(encode_codes(made.model, one))
        apart.append(distance(made.decode(found[None]), one))
        shuffled.append(distance(made.decode(found[torch.randperm(len(found))][None]), one))
    assert sum(apart) / 3 < 0.5 * sum(shuffled) / 3


def test_sentences_that_are_judged_differ() -> None:
    """Drawn ones come again, and one that is misheard would count as often."""
    assert (
        len(set(held_out_sentences(40)))
        == 40
        > len({sentence(seed, "held-out") for seed in range(40)})
    )


@pytest.mark.exhaustive
def test_the_ear_reads_what_is_said_and_nothing_else() -> None:
    """The recogniser that judges was taught without a codec, and makes no words of disorder."""
    speech = Path(utterances.__file__).parent
    teaching = [*files_beside(recognition), *speech.glob("*s.py")]  # recordings, sentences, ...
    teaching = [file for file in teaching if file.name != "codecs.py"]
    assert {"recordings.py", "sentences.py", "utterances.py"} <= {file.name for file in teaching}
    assert not [file for file in teaching if "speech.synthesis" in file.read_text()]
    made, said = load_codec(zoo.path("codec-lm") / "codec"), [one.text for one in recordings()[:3]]
    generator = torch.Generator().manual_seed(0)
    found = [torch.tensor(encode_codes(made.model, one)) for one in recorded()]
    mixed = [row[torch.randperm(len(row), generator=generator)] for row in found]
    right, wrong = (
        word_error_rate(said, [made.decode(row[None]) for row in codes])["word_error_rate"]
        for codes in (found, mixed)
    )
    assert right < 0.3 < 0.9 < wrong


def files_beside(module: ModuleType) -> list[Path]:
    assert module.__file__ is not None
    return [*Path(module.__file__).parent.rglob("*.py")]


def distance(wave: Tensor, wanted: CodecInput) -> float:
    return float((log_mel(wave[None]) - log_mel(wanted.waves[None])).abs().mean())


def test_the_zoo_of_speech_is_small() -> None:
    names = [name for name in zoo.names() if name.startswith("codec-lm")]
    files = [file for name in names for file in zoo.path(name).rglob("*.safetensors")]
    assert len(files) == 9
    assert sum(file.stat().st_size for file in files) <= 10_000_000


@pytest.mark.exhaustive
def test_speech_is_understood_in_good_part() -> None:
    """Far better than another sentence would be; the card says how well."""
    count = 6
    out = speaking("plain").synthesize(
        held_out_sentences(count), voice=cycle_speakers(count), **HOW
    )
    right = word_error_rate(held_out_sentences(count), out.waveforms)["word_error_rate"]
    other = word_error_rate(held_out_sentences(count)[::-1], out.waveforms)["word_error_rate"]
    assert right < 0.7 * other


@pytest.mark.exhaustive
def test_a_stream_of_a_codec_that_norms_over_time_never_takes_sound_back() -> None:
    """It can be heard only when a row has ended: until then all of it would still change."""
    fast = speaking("coupled", "codec-lm-drafter", length=3)
    heard_so_far, frames = torch.zeros(0), 0
    for kept in fast.stream(held_out_sentences(1)[0], voice="ada", **HOW):
        now = kept.partial()[0]
        assert torch.allclose(now[: len(heard_so_far)], heard_so_far, atol=1e-5)
        heard_so_far, frames = now, frames + len(kept.tokens[0])
    assert torch.equal(
        heard_so_far, fast.synthesize(held_out_sentences(1), voice="ada", **HOW).waveform
    )
    assert len(heard_so_far) == (frames - 1) * HOP  # all but the end


@pytest.mark.exhaustive
def test_the_streaming_codec_sounds_within_three_rounds() -> None:
    """Its stream is the decode of all codes, which are those of the other codec."""
    fast = speaking("coupled", "codec-lm-drafter", length=3, codec=STREAMING_CODEC)
    heard, first = torch.zeros(0), 0
    for kept in fast.stream(held_out_sentences(1)[0], voice="ada", **HOW):
        now = kept.partial()[0]
        assert torch.allclose(now[: len(heard)], heard, atol=1e-4)
        heard = now
        if not first and len(heard):
            first = kept.index + 1
    whole = fast.synthesize(held_out_sentences(1), voice="ada", **HOW)
    assert torch.allclose(heard, whole.waveform, atol=1e-4)
    assert first == whole.stats.first_audio_round
    assert 0 < first <= 3
    late = speaking("coupled", "codec-lm-drafter", length=3)
    late_out = late.synthesize(held_out_sentences(1), voice="ada", **HOW)
    assert codes(whole) == codes(late_out)
    assert int(late_out.stats.first_audio_round or 0) > 20  # when it ends


@pytest.mark.exhaustive
def test_a_streaming_codec_learns_the_speech_of_codes() -> None:
    model, losses = build_streaming_codec(), list[float]()
    course = TrainingRun(progress=lambda *seen: losses.append(seen[3]))
    coder = load_codec(zoo.path("codec-lm") / "codec").model
    pool = [DecoderExample(torch.tensor(encode_codes(coder, one)), one.waves) for one in recorded()]
    batches = sample_examples(pool, 2, 0)
    train_streaming_codec(model, batches, CosineDecay(12, 2e-3), course)
    assert losses[-1] < 0.8 * losses[0]
    one = next(batches)
    with torch.no_grad():
        made = model.decode(one.codes[:, None]).audio_values[:, 0]
    assert float(spectral_distance(made, one.waves)) < losses[0]


def test_what_is_not_said_the_generation_configuration_says() -> None:
    def codes(**settings: Any) -> list[int]:
        said = speaking("plain").synthesize("a red ring", seed=1, max_new_tokens=25, **settings)
        return list(said.codes[0][0].tolist())

    own = codes()
    assert own == codes(temperature=0.8)
    assert own != codes(temperature=2.0)
    assert codes(temperature=0) == codes(do_sample=False) != own
    aware = codes(repetition_aware=True)
    assert aware == codes(repetition_aware=True, temperature=0.8)
    assert aware != codes(repetition_aware=True, temperature=2.0)
