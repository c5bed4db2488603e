"""Train the bundled recognisers from a seed, in under an hour each on one CPU core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mmspec.modalities.speech.recognition.checkpoints import load, processor
from mmspec.modalities.speech.utterances import RecordingConditions, utterance
from mmspec.modality import Entry
from mmspec.training.fitting import CosineDecay, TrainingProgress, TrainingRun, iterate_chunks
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.speech.recognition import granite, granite_training, whisper, whisper_training
from tools.zoo.speech.recognition.evaluate import acceptance, word_errors

ABOUT = """\
Transcribes sentences of the Scene world of the `mmspec` zoo, up to four seconds long, spoken by
espeak-ng in several voices; the text is lower case without punctuation, and tokens are letters.

The encoder is trained first, then the decoder on its states, of `whisper` finally both together.
Half of the recordings have noise. The drafter is trained on the outputs of its target.
"""
NOTES = """\
`word error rate` is that of greedy transcripts of held-out sentences, over all words, and `clean`
the same without the noise that half of the recordings have; `of ctc` is that of the text of the
CTC head. `acceptance length` is tokens per round of greedy chain speculation on held-out
sentences with five drafted tokens. Measured on the float16 weights, run in float32.
"""
HELD_OUT = 256
BATCH = 16
DRAFTED = 5  # tokens per round in acceptance measurements
_AT_ONCE, ACCEPTANCE_COUNT = 32, 48  # recordings: per batch, and in acceptance measurements

Transcribe = Callable[[Any, Any, Sequence[Tensor]], list[str]]


@dataclass(frozen=True)
class RecogniserPlan:
    """Training stages: first the encoder, then the decoder on its frozen states.

    Whisper trains both on a pool of windows, then jointly on another one. Granite trains both on
    two pools, the decoder first with few layers, then with all of them.
    """

    pool: int
    decoder_stages: tuple[CosineDecay, ...]
    encoder_stages: tuple[CosineDecay, ...] = ()  # a draft model uses its target's encoder
    joint_stages: tuple[CosineDecay, ...] = ()

    @property
    def stages(self) -> tuple[CosineDecay, ...]:
        return (*self.encoder_stages, *self.decoder_stages, *self.joint_stages)


PLANS = {
    "whisper": RecogniserPlan(
        6000,
        (CosineDecay(700, 1.5e-3),),
        (CosineDecay(1000, 2e-3),),
        joint_stages=(CosineDecay(1800, 1e-3),),
    ),
    "whisper-drafter": RecogniserPlan(3000, (CosineDecay(900, 3e-3),)),
    "granite-speech": RecogniserPlan(
        5000,
        (CosineDecay(1000, 2e-3), CosineDecay(600, 1e-3)),
        (CosineDecay(600, 2e-3), CosineDecay(600, 1e-3)),
    ),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train encoder and decoder of a recogniser; a draft model by distillation from its target."""
    run, plan = TrainingRun(seed, steps, progress), PLANS[entry.name]
    model = _TRAINERS[entry.name](entry, folder, plan, run)
    return {
        "steps": sum(run.limit_steps(schedule.steps) for schedule in plan.stages),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Word error rates (a target), or tokens per round with five drafted tokens (a drafter)."""
    model, reader = load(entry, folder), processor(entry, folder)
    if entry.target is not None:
        sounds = [
            utterance(seed, "held-out").waveform for seed in range(min(count, ACCEPTANCE_COUNT))
        ]
        inputs = [whisper.prepare_inputs(reader, [sound]) for sound in sounds]
        target = load_teacher(entry.target)
        return {"acceptance_length": acceptance(target, "whisper-assisted", model, inputs, DRAFTED)}
    methods: dict[str, Transcribe] = {"word_error_rate": _TRANSCRIBERS[entry.name]}
    if entry.name == "granite-speech":
        methods["word_error_rate_of_ctc"] = granite.transcribe_by_ctc
    report, clean = {}, RecordingConditions()
    for name, transcribe in methods.items():
        report[name] = _measure_word_errors(transcribe, model, reader, count, None)
        report[f"clean_{name}"] = _measure_word_errors(transcribe, model, reader, count, clean)
    return report


def _measure_word_errors(
    transcribe: Transcribe, model: Any, reader: Any, count: int, room: RecordingConditions | None
) -> float:
    utterances = [utterance(seed, "held-out", room=room) for seed in range(count)]
    found: list[str] = []
    for part in iterate_chunks(utterances, _AT_ONCE):
        found += transcribe(model, reader, [one.waveform for one in part])
    return round(word_errors([one.text for one in utterances], found).rate, 4)


def _train_whisper(entry: Entry, folder: Path, plan: RecogniserPlan, run: TrainingRun) -> Any:
    [encoder], [decoder], [joint] = plan.encoder_stages, plan.decoder_stages, plan.joint_stages
    reader = whisper.build_processor()
    model = whisper.build(reader.tokenizer).train()
    examples = whisper_training.make_examples(reader, plan.pool, run)

    with _saving(model, reader, whisper, folder):
        whisper_training.train_encoder(model, examples, BATCH, encoder, run)
        states = whisper_training.encode_windows(model, examples)
        whisper_training.train_decoder(model, states, examples, BATCH, decoder, run)
        later = run.with_seed_offset(1)
        others = whisper_training.make_examples(reader, plan.pool, later)
        whisper_training.train_jointly(model, others, BATCH, joint, later)
    return model


def _train_drafter(entry: Entry, folder: Path, plan: RecogniserPlan, run: TrainingRun) -> Any:
    """A decoder of one layer on its target's encoder."""
    assert entry.target is not None
    [stage] = plan.decoder_stages
    target, reader = load_teacher(entry.target), whisper.build_processor()
    examples = whisper_training.make_examples(reader, plan.pool, run)
    states = whisper_training.encode_windows(target, examples)
    model = whisper.build_drafter(reader.tokenizer, target).train()
    with _saving(model, reader, whisper, folder):
        whisper_training.train_drafter(model, target, states, examples, BATCH, stage, run)
    return model


def _train_granite(entry: Entry, folder: Path, plan: RecogniserPlan, run: TrainingRun) -> Any:
    reader = granite.build_processor()
    tokenizer = reader.tokenizer
    model = granite.build(tokenizer, granite.SHALLOW).train()
    runs = [run.with_seed_offset(i) for i in range(2)]
    first, second = (granite_training.make_examples(reader, plan.pool, one) for one in runs)
    examples = granite_training.concatenate(first, second)
    shallow, deep = plan.decoder_stages
    with _saving(model, reader, granite, folder):
        for number, stage in enumerate(plan.encoder_stages):
            later = run.with_seed_offset(2 * number)
            granite_training.train_encoder(model, examples, BATCH, stage, later)
        pool = granite_training.encode_spans(model, examples)
        growing = shallow.steps // 2
        granite_training.train_decoder(model, reader, pool, growing, shallow, run)
    model = granite.deepen(model, tokenizer).train()
    with _saving(model, reader, granite, folder):
        granite_training.train_decoder(model, reader, pool, 0, deep, run.with_seed_offset(1))
    return model


@contextmanager
def _saving(model: Any, reader: Any, family: Any, folder: Path) -> Iterator[None]:
    """Save a model and its processor on exit."""

    def save() -> None:
        model.generation_config = family.generation_config(reader.tokenizer)
        model.half().save_pretrained(folder)
        reader.save_pretrained(folder)

    with save_on_exit(save):
        yield


_TRAINERS = {
    "whisper": _train_whisper,
    "whisper-drafter": _train_drafter,
    "granite-speech": _train_granite,
}
_TRANSCRIBERS: dict[str, Transcribe] = {
    "whisper": whisper.transcribe,
    "granite-speech": granite.transcribe,
}
