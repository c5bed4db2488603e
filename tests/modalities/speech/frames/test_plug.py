"""MusicGen and CSM: their own sound when greedy, plain decoding's with a seed, clear refusals."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CsmProcessor, EncodecFeatureExtractor, PreTrainedTokenizerFast

import mmspec
from mmspec.decode import BrokenLogits
from mmspec.distributions.noise import KeyedNoise
from mmspec.modalities.speech.frames import tiny_models
from mmspec.modalities.speech.frames.measures import TOLERANCE
from mmspec.modalities.speech.frames.plug import make_reader
from mmspec.modalities.speech.frames.settings import parse_frame_settings
from mmspec.targets.frames.frames import FrameRequest, FrameTarget
from tests.covering import covering, exhaustive, limited
from tests.toys import speech_models

NAMES = ["delay", "depth", "melody"]  # those of Dia are in `test_dia`
MAKERS = {**tiny_models.MODELS, "melody": tiny_models.melody}
RAGGED = {
    "input_ids": torch.tensor([[0, 0, 4, 5], [6, 7, 8, 9]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
}
STEPS = 12


@cache
def model(name: str, seed: int = 0, layers: int = 2) -> Any:
    return MAKERS[name](seed, layers)


def fast(name: str, recipe: str = "frame-plain", drafter: Any = None) -> mmspec.Accelerated:
    small = model(name, 1, 1) if drafter is None else drafter
    taken = mmspec.recipes.get(recipe).takes_drafter
    return mmspec.accelerate(model(name), recipe, drafter=small if taken else None)


def synthesize(one: mmspec.Accelerated, **given: Any) -> Any:
    how = {"max_new_tokens": STEPS, "temperature": 1.0, "top_k": 0, "seed": 5}
    return one.synthesize(**{**RAGGED, **how, **given})


def codes(out: Any) -> list[Any]:
    return [row.tolist() for row in out.codes]


@pytest.mark.parametrize(
    ("name", "recipe"),
    limited(covering(NAMES, ("frame-coupled", "frame-depth", "frame-lookup"), strength=1), 2),
)
def test_greedy_sound_is_that_of_generate(name: str, recipe: str) -> None:
    found = fast(name, recipe)
    mine = synthesize(found, temperature=0.0)
    session = found.session
    inputs, how = session.prepare_arguments({**RAGGED, "max_new_tokens": STEPS, "temperature": 0.0})
    own = session.reader.generate_audio(inputs, how, session.codec)
    for one, other in zip(mine.waveforms, own, strict=True):
        assert len(one) > 0
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MAKERS)
def test_every_code_of_tiny_models_has_a_sound_of_its_own(name: str) -> None:
    """Else a comparison of sound could not fail."""
    own = tiny_models.dia_processor() if name == "end" else None
    codec = make_reader(model(name)).codec(own)
    for book in range(tiny_models.BOOKS):
        frames = torch.zeros(tiny_models.BOOKS, 6, dtype=torch.int64)
        plain = codec.decode(frames)
        for code in range(1, tiny_models.CODES):
            frames[book] = code
            assert (codec.decode(frames) - plain).abs().max() > 10 * TOLERANCE


CONFIGURED: dict[str, Any] = {
    **{"exponential_decay_length_penalty": (2, 3.0), "encoder_repetition_penalty": 3.0},
    **{"max_time": 1e-9, "top_h": 0.1, "forced_bos_token_id": 1, "forced_eos_token_id": 1},
    **{"begin_suppress_tokens": [3], "encoder_no_repeat_ngram_size": 1, "stop_strings": ["a"]},
    **{"watermarking_config": {"bias": 5.0}, "prompt_lookup_num_tokens": 2, "use_cache": False},
    **{"token_healing": True, "dola_layers": "high", "is_assistant": True, "penalty_alpha": 0.6},
}


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_fields_of_a_configuration_that_would_be_ignored_are_refused(name: str) -> None:
    own = MAKERS[name](0, 2)
    processor = tiny_models.dia_processor() if name == "end" else None
    session = mmspec.accelerate(own, "frame-plain", processor=processor).session
    given = {**tiny_models.tiny_request(name), "seed": None}
    session.prepare_arguments(given)
    usual = own.generation_config
    for field, value in CONFIGURED.items():
        own.generation_config = deepcopy(usual)
        setattr(own.generation_config, field, value)
        with pytest.raises(ValueError, match=f"{field}=.* is not supported for frames"):
            session.prepare_arguments(given)
    for scale in (0, 0.5, -1.0, *([3.0] if name == "depth" else [])):
        own.generation_config = deepcopy(usual)
        own.generation_config.guidance_scale = scale
        with pytest.raises(ValueError, match=r"guidance_scale of the .*(at least 1|no guidance)"):
            session.prepare_arguments(given)


def test_a_configured_end_that_is_a_code_is_refused() -> None:
    own = MAKERS["delay"](0, 2)
    own.generation_config.eos_token_id = [tiny_models.CODES]
    assert make_reader(own)
    own.generation_config.eos_token_id = [tiny_models.CODES, 3]
    with pytest.raises(ValueError, match=r"eos_token_id=\[4, 3\] .* is a code of the books"):
        make_reader(own)


@pytest.mark.parametrize(
    "size", limited(exhaustive((2, 3, 5), (2, 5)), 1)
)  # repeated or cut to three
@pytest.mark.parametrize(
    "recipe", exhaustive(("frame-lookup", "frame-coupled"), ("frame-coupled",))
)
def test_a_melody_is_that_of_generate(recipe: str, size: int) -> None:
    chroma = torch.eye(4)[torch.tensor([[0, 3, 1, 2, 2], [2, 1, 1, 0, 3]])][:, :size]
    found, given = fast("melody", recipe), {**RAGGED, "input_features": chroma}
    mine = found.synthesize(**given, max_new_tokens=STEPS, temperature=0.0)
    inputs, how = found.session.prepare_arguments(
        {**given, "max_new_tokens": STEPS, "temperature": 0.0}
    )
    own = found.session.reader.generate_audio(inputs, how, found.session.codec)
    for one, other in zip(mine.waveforms, own, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert codes(mine) != codes(synthesize(fast("melody"), temperature=0.0))
    drawn = synthesize(found, input_features=chroma)
    assert codes(drawn) == codes(synthesize(fast("melody"), input_features=chroma))
    with pytest.raises(ValueError, match="hold 1 melodies for 2 texts"):
        synthesize(found, input_features=chroma[:1])
    with pytest.raises(ValueError, match="no audio prompt here"):
        synthesize(fast("delay"), input_features=chroma)


def test_a_draft_model_of_other_chroma_bins_is_refused() -> None:
    target, small = MAKERS["melody"](0, 2), MAKERS["melody"](1, 1)
    assert make_reader(target).like(small).model is small
    small.config.num_chroma = 5
    with pytest.raises(ValueError, match="num_chroma=5 bins, the target of 4"):
        make_reader(target).like(small)


@pytest.mark.parametrize("name", NAMES)
def test_a_length_of_the_configuration_is_that_of_generate(name: str) -> None:
    own = MAKERS[name](0, 2)
    own.generation_config.max_length = 15
    one = {key: value[:, :3] for key, value in RAGGED.items()}
    inputs, how = mmspec.accelerate(own, "frame-plain").session.prepare_arguments(
        {**one, "temperature": 0.0}
    )
    drawn = {"do_sample": False} | ({"depth_decoder_do_sample": False} if name == "depth" else {})
    made = own.generate(**inputs, **drawn)
    steps = made.shape[1] if name == "depth" else made.shape[-1] // 8 + tiny_models.BOOKS - 1
    assert how.max_frames == steps


def test_padding_is_told_by_its_id_where_no_mask_is_given() -> None:
    how: dict[str, Any] = {"temperature": 0.0, "seed": None}
    masked = codes(synthesize(fast("depth"), **how))
    assert codes(synthesize(fast("depth"), attention_mask=None, **how)) == masked
    alone = {"input_ids": RAGGED["input_ids"][:1, 2:], "attention_mask": None}
    assert codes(synthesize(fast("depth"), **alone, **how)) == masked[:1]


def test_a_depth_decoder_draws_as_its_own_configuration_says() -> None:
    own = MAKERS["depth"](0, 2)
    for part, temperature in ((own, 0.9), (own.depth_decoder, 0.3)):
        part.generation_config.update(do_sample=True, temperature=temperature)
    session = mmspec.accelerate(own, "frame-plain").session
    how = session.prepare_arguments({**RAGGED, "max_new_tokens": STEPS})[1]
    assert (how.sampling.temperature, how.depth.temperature) == (0.9, 0.3)


WARPS: tuple[dict[str, Any], ...] = ({}, {"top_k": 2, "temperature": 0.7})


@pytest.mark.parametrize(
    ("name", "recipe", "given"),
    limited(covering(tuple(NAMES), ("frame-coupled", "frame-lookup"), WARPS, strength=1), 2),
    ids=str,
)
def test_a_seed_says_what_plain_decoding_says(
    name: str, recipe: str, given: dict[str, Any]
) -> None:
    found, plain = fast(name, recipe), fast(name)
    assert codes(synthesize(found, **given)) == codes(synthesize(plain, **given))


@pytest.mark.parametrize("name", exhaustive(NAMES, ("delay",)))
def test_who_drafts_for_itself_is_never_refused(name: str) -> None:
    for recipe in ("frame-coupled", "frame-depth", *(["frame-joint"] if name != "depth" else [])):
        # seed 5 ends a row of "depth" inside a draft, whose last frame then counts as drafted only
        out = synthesize(fast(name, recipe, model(name)), seed=3)
        stats = out.stats
        assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0
        assert stats.target_calls < STEPS / 3 + 1
    assert codes(synthesize(fast(name, "frame-coupled", model(name)))) == codes(
        synthesize(fast(name))
    )


def test_the_distribution_is_that_of_generate() -> None:
    """Guidance, temperature and top-k of the first step, as the model's own loop makes them."""
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 2, "top_p": 1.0}
    how: dict[str, Any] = {"output_scores": True, "return_dict_in_generate": True}
    own = model("delay").generate(
        **RAGGED, **drawn, **how, max_new_tokens=STEPS, guidance_scale=2.0
    )
    session = fast("delay").session
    given = {**RAGGED, **drawn, "max_new_tokens": STEPS}
    inputs, asked = session.prepare_arguments(given)
    assert asked.guidance == 2.0
    noise = KeyedNoise.from_seed(0, 2, torch.device("cpu"))
    distribution: Any = (
        FrameTarget(session.reader).prefill(FrameRequest(inputs, asked, noise)).scores
    )
    wanted = own.scores[0].view(2, tiny_models.BOOKS, -1).softmax(-1)
    torch.testing.assert_close(
        distribution.distribution.codes.probs[:, 0], wanted, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("name", exhaustive(NAMES, ("depth",)))
def test_a_stream_plays_verified_frames_alone(name: str) -> None:
    found = fast(name, "frame-coupled", model(name))
    heard = [torch.zeros(0)] * 2
    steps, hop = [0, 0], found.session.codec.hop
    first: dict[str, int] = {}
    how: dict[str, Any] = {"max_new_tokens": STEPS, "temperature": 1.0, "top_k": 0, "seed": 5}
    for kept in found.stream(**RAGGED, **how):
        now = kept.partial()
        for row, (before, after) in enumerate(zip(heard, now, strict=True)):
            steps[row] += len(kept.tokens[row])
            assert len(after) <= steps[row] * hop
            assert torch.allclose(after[: len(before)], before, atol=1e-5)
        heard = now
        if any(map(len, heard)):
            first.setdefault("fast", kept.index)
    for kept in fast(name).stream(**RAGGED, **how):
        if any(map(len, kept.partial())):
            first.setdefault("plain", kept.index)
    whole = synthesize(found)
    for mine, wanted in zip(heard, whole.waveforms, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-5)
    assert first["fast"] <= first["plain"] + 1


def test_books_come_late_by_their_number() -> None:
    framing = fast("delay").session.reader.framing(6)
    steps = [torch.tensor([10 * step + book for book in range(3)]) for step in range(6)]
    assert framing.codes(steps).tolist() == [[0, 10, 20, 30], [11, 21, 31, 41], [22, 32, 42, 52]]
    assert [framing.count_frames(steps[:count]) for count in range(7)] == [0, 0, 0, 1, 2, 3, 4]
    forced = fast("delay").session.reader.forced_codes(torch.arange(6)[None], 6)[0]
    free = [[int(one < 0) for one in row] for row in forced.tolist()]
    assert free == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 0, 1]]


def test_speech_that_has_ended_is_cut() -> None:
    reader = fast("depth").session.reader
    stop, framing = reader.stop(9), reader.framing(9)
    frames = [torch.tensor(one) for one in ([1, 2, 3], [0, 1, 0], [0, 0, 2], [1, 1, 1])]
    assert stop.cut(0, 0, frames) == (3, True)
    assert stop.cut(0, 8, frames[:2]) == (1, True)
    assert framing.codes(frames[:3]).shape == (3, 2)
    assert framing.is_over(frames[:3])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty text": ({"text": ""}, "has no words"),
    "no prompt": ({}, "give synthesize"),
    "voice": ({**RAGGED, "voice": "anna"}, "needs a text"),
    "too few": ({**RAGGED, "max_new_tokens": 2}, "at least 4"),
    "none": ({**RAGGED, "max_new_tokens": 0}, "max_new_tokens=0"),
    "ids of no words": ({"input_ids": torch.ones(1, 4)}, "give ids as whole numbers"),
    "a list": ({"input_ids": [[1, 2]]}, "are not prompts"),
    "a sound to go on from": (
        {**RAGGED, "input_values": torch.zeros(2, 1, 8)},
        "no audio prompt here",
    ),
    "a text and a mask": ({"text": "rain", "attention_mask": torch.ones(1, 2)}, "either a text"),
    "half a mask": ({**RAGGED, "attention_mask": torch.full((2, 4), 0.5)}, "give 1 for tokens"),
    "no time": ({**RAGGED, "seconds": 0.0}, r"seconds=0\.0 must be above 0"),
    "both lengths": ({**RAGGED, "max_new_tokens": 9, "seconds": 1}, "give one"),
    "unknown": ({**RAGGED, "speed": 2}, "unknown keyword speed"),
    "guidance": ({**RAGGED, "guidance": 0.5, "max_new_tokens": 4}, "at least 1"),
    "no processor": ({"text": "rain"}, "the folder of the model's processor is unknown"),
}


def test_audio_of_earlier_turns_is_a_tensor() -> None:
    with pytest.raises(ValueError, match="input_values=0 must be a tensor"):
        fast("depth").synthesize(**RAGGED, input_values=0)


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused(case: str) -> None:
    asked, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        fast("delay").synthesize(**asked)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="decodes tokens"):
        mmspec.accelerate(model("delay"), "coupled", drafter=model("delay", 1))
    with pytest.raises(ValueError, match="tests codes that are independent"):
        mmspec.accelerate(model("depth"), "frame-joint", drafter=model("depth", 1))
    with pytest.raises(ValueError, match="cannot draft for MusicGen"):
        mmspec.accelerate(model("delay"), "frame-coupled", drafter=model("depth"))
    with pytest.raises(ValueError, match="must be a whole number"):
        mmspec.accelerate(model("delay"), "frame-lookup", length="auto")
    lookup = mmspec.accelerate(model("delay"), "frame-lookup").session.drafter
    with pytest.raises(ValueError, match=r"length= would change nothing: a \w+ object"):
        mmspec.accelerate(model("delay"), "frame-lookup", drafter=lookup, length=2)
    with pytest.raises(ValueError, match="has no guidance"):
        fast("depth").synthesize(**RAGGED, max_new_tokens=4, guidance=2.0)
    strange = model("delay").generation_config
    strange.repetition_penalty = 1.5
    try:
        with pytest.raises(ValueError, match=r"repetition_penalty=1\.5"):
            parse_frame_settings(
                fast("delay").session.reader, fast("delay").session.codec, {"seconds": 1}
            )
    finally:
        strange.repetition_penalty = None


def test_families_that_are_not_read_say_why() -> None:
    class Config:
        model_type = "moshi"

    class Moshi(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

    given: tuple[dict[str, Any], ...] = ({"modality": "frames"}, {"recipe": "plain"})
    for how in given:  # before any recipe is advised
        with pytest.raises(ValueError, match="is not supported: it has a second audio stream"):
            mmspec.accelerate(Moshi(), **how)


def test_broken_logits_lose_nothing() -> None:
    broken = tiny_models.csm()
    one = mmspec.accelerate(broken, "frame-plain")
    before = synthesize(one)

    def damage(kept: Any) -> None:
        if kept.index == 1:
            broken.backbone_model.norm.weight.data.fill_(torch.nan)

    with pytest.raises(BrokenLogits) as error:
        synthesize(one, on_round=damage)
    said = [torch.stack(row, -1).tolist() for row in error.value.tokens]
    assert said == [[book[:2] for book in row] for row in codes(before)]


def test_a_folder_is_loaded_and_saved(tmp_path: Path) -> None:
    model("depth").save_pretrained(tmp_path / "model")
    read = mmspec.accelerate(tmp_path / "model", "frame-coupled", drafter=model("depth", 1, 1))
    assert codes(synthesize(read)) == codes(synthesize(fast("depth")))
    read.save_pretrained(tmp_path / "saved")
    again = mmspec.load(tmp_path / "saved", model("depth"))
    assert codes(synthesize(again)) == codes(synthesize(read))


def test_a_text_is_a_turn_of_its_speaker() -> None:
    said = "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}"
    turns = "{% for m in messages %}{{ m['role'] }} " + said + "{% endfor %}"
    marks = {"audio_token": "[UNK]", "audio_eos_token": "[PAD]"}
    words: Any = PreTrainedTokenizerFast(
        tokenizer_object=speech_models.words()._tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        extra_special_tokens=marks,
    )
    reads = CsmProcessor(EncodecFeatureExtractor(sampling_rate=1000), words, turns)
    one = mmspec.accelerate(model("depth"), "frame-plain", processor=reads)
    inputs, _ = one.session.prepare_arguments(
        {"text": ["a red circle", "blue"], "voice": "left", "seconds": 1}
    )
    assert inputs["input_ids"].tolist() == [[7, 2, 3, 4], [0, 0, 7, 5]]
    out = one.synthesize(["a red circle", "blue"], voice="left", max_new_tokens=4, seed=1)
    assert [row.shape[0] for row in out.codes] == [tiny_models.BOOKS] * 2
