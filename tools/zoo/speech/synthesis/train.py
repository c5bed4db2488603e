"""Train the bundled codec, codec language model and its draft models from a seed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from mmspec.api import accelerate
from mmspec.codes.bigrams import Bigrams
from mmspec.modalities.speech import CODEC
from mmspec.modalities.speech.codecs import load_codec
from mmspec.modalities.speech.synthesis.checkpoints import load
from mmspec.modalities.speech.utterances import ZOO_VOICES
from mmspec.modality import Entry
from mmspec.models.compatibility import sign_head
from mmspec.models.heads.multi_token import (
    MultiTokenHeads,
    MultiTokenHeadsConfig,
    load_multi_token_heads,
)
from mmspec.training.fitting import CosineDecay, TrainingProgress, TrainingRun, shuffle_batches
from mmspec.training.heads import TrainingExample
from mmspec.training.multi_token import MULTI_TOKEN
from mmspec.training.trainable import train_head
from mmspec.zoo.training import load_teacher, require_checkpoint, save_on_exit
from tools.zoo.speech.synthesis import models
from tools.zoo.speech.synthesis.codec import build_codec
from tools.zoo.speech.synthesis.codec_training import (
    CodecInput,
    extract_inputs,
    sample_crops,
    train_codec,
)
from tools.zoo.speech.synthesis.evaluate import (
    acceptance,
    reconstruct_speech,
    speech_word_errors,
    word_error_rate,
)
from tools.zoo.speech.synthesis.language_model_training import (
    SENTENCES,
    CorpusUtterance,
    SpeechRow,
    batches,
    encode_codes,
    make_corpus,
    make_rows,
    train_speech_model,
)
from tools.zoo.speech.synthesis.multi_token_training import train_jointly
from tools.zoo.speech.synthesis.streaming_codec import STREAMING_CODEC, make_streaming_codec

ABOUT = """\
Synthesizes sentences of the Scene world of the `mmspec` zoo in two voices, `paul` and `ada`. The
folder `codec` of the target, an X-codec 2 of 16 kHz, decodes its codes, 50 per second out of
1024; `speech_codes` in `config.json` gives their ids. A token of text is a word; words outside
the Scene world are `<unk>`. The folder `streaming-codec`, a Mimi without an encoder, decodes the
same codes while they are generated: it needs 12 frames before new ones and looks 1.6 frames ahead.

The codec, the language model and its draft models are trained on speech of espeak-ng.
"""
TEMPERATURE, CHAIN = 0.8, 4  # default temperature and draft length, also of measurements
HELD_OUT = 40
OWN_HEADS = "heads"  # folder of a target
NOTES = f"""\
`word error rate` is that of the bundled recogniser `whisper`, which was not trained on the codec,
on {HELD_OUT} different held-out sentences, at temperature {TEMPERATURE} with seed 0 (0.083 with
seed 1); `espeak word error rate` is that of espeak-ng's own speech, `codec word error rate` that
of the same through the codec, and `codec log mel` its distance from the original, in nats.
Sampled sentences may repeat: four of the first 40 are one that the recogniser already mishears in
espeak-ng's speech, and 0.124 of their words are wrong. `acceptance length` is tokens per round of
coupled chains of {CHAIN} at the same temperature. All are measured on the float16 weights, run in
float32.
"""
BATCH, CROPS, HEADS, HEADS_BATCH = 16, 8, 4, 4
CODEC_FALL, HEADS_FALL = CosineDecay(2600, 1.5e-3), CosineDecay(800, 4e-3)


CONTINUED = {"codec-lm-mtp": "codec-lm"}  # targets that are trained on from another, with heads
CONTINUED_FALL = CosineDecay(2000, 1.2e-3)


@dataclass(frozen=True)
class SpeechModelPlan:
    """Size and training stages of a model, and the weight of its auxiliary word loss."""

    size: models.ModelSize
    stages: tuple[CosineDecay, ...]
    word_loss_weight: float = 1.0


PLANS = {
    "codec-lm": SpeechModelPlan(
        models.TARGET, (CosineDecay(3600, 2.5e-3), CosineDecay(1600, 1.2e-3))
    ),
    "codec-lm-drafter": SpeechModelPlan(models.DRAFTER, (CosineDecay(1200, 3e-3),), 0.0),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train a codec and a language model of its codes; or a draft model or heads for it."""
    run = TrainingRun(seed, steps, progress)
    utterances = make_corpus(run.limit_steps(SENTENCES, BATCH), progress=progress)
    inputs = extract_inputs([one.waveform for one in utterances])
    base = CONTINUED.get(entry.name, entry.target)
    if base is None:
        codec: Any = make_codec(inputs, run)
    else:
        codec = load_codec(require_checkpoint(base) / CODEC).model
    codes = [encode_codes(codec, one) for one in inputs]
    examples = make_rows(utterances, codes)
    if entry.name in CONTINUED:
        return continue_training(CONTINUED[entry.name], folder, examples, run)
    if entry.name not in PLANS:
        return train_heads(entry, folder, examples, run)
    plan = PLANS[entry.name]
    model: Any = models.build_model(plan.size)
    codecs: dict[str, Any] = {}
    if entry.target is None:
        codecs = {CODEC: codec, STREAMING_CODEC: make_streaming_codec(inputs, codes, run)}

    def save() -> None:
        model.generation_config.update(do_sample=True, temperature=TEMPERATURE)
        model.half().save_pretrained(folder)
        models.tokenizer().save_pretrained(folder)
        for name, one in codecs.items():
            one.half().save_pretrained(folder / name)

    with save_on_exit(save):
        for number, schedule in enumerate(plan.stages):
            items = batches(examples, BATCH, seed + number)
            train_speech_model(model, items, schedule, run, plan.word_loss_weight)
    return {
        "steps": sum(run.limit_steps(schedule.steps) for schedule in plan.stages),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def make_codec(inputs: Sequence[CodecInput], run: TrainingRun) -> Any:
    """Train a codec."""
    codec = build_codec()
    train_codec(codec, sample_crops(inputs, CROPS, run.seed), CODEC_FALL, run)
    return codec


def continue_training(
    base: str, folder: Path, examples: Sequence[SpeechRow], run: TrainingRun
) -> dict[str, Any]:
    """Train a model on together with heads, which are saved in the folder `OWN_HEADS`."""
    model: Any = load_teacher(base)
    heads: Any = load_teacher(f"{base}-heads")
    set_bigrams(heads, heads.bigrams[:0])
    steps = run.limit_steps(CONTINUED_FALL.steps)

    def save() -> None:
        model.half().save_pretrained(folder)
        models.tokenizer().save_pretrained(folder)
        shutil.copytree(require_checkpoint(base) / CODEC, folder / CODEC)
        heads.half().save_pretrained(folder / OWN_HEADS)

    with save_on_exit(save):
        items = batches(examples, BATCH, run.seed + 1)
        train_jointly(model, heads, items, CONTINUED_FALL, run)
    return {"steps": steps, "parameters": sum(p.numel() for p in model.parameters())}


def train_heads(
    entry: Entry, folder: Path, examples: Sequence[SpeechRow], run: TrainingRun
) -> dict[str, Any]:
    """Train multi-token heads, and count code bigrams.

    Heads that were trained together with their target are taken from its folder.
    """
    assert entry.target is not None
    reader: Any = accelerate(load_teacher(entry.target), "plain").session.bound.backbone
    own = require_checkpoint(entry.target) / OWN_HEADS
    if own.is_dir():
        trained: Any = load_multi_token_heads(own)
        set_bigrams(trained, count_bigrams(examples))
        sign_head(trained, reader)
        trained.half().save_pretrained(folder)
        return {"steps": 0, "parameters": sum(p.numel() for p in trained.parameters())}
    counts = count_bigrams(examples)
    config = MultiTokenHeadsConfig.of(
        reader.config, reader.vocabulary, num_heads=HEADS, num_layers=2, num_bigrams=len(counts)
    )
    heads: Any = MultiTokenHeads(config)
    set_bigrams(heads, counts)
    steps = run.limit_steps(HEADS_FALL.steps)
    with save_on_exit(lambda: heads.half().save_pretrained(folder)):
        train_head(
            MULTI_TOKEN,
            reader,
            heads,
            head_examples(examples, HEADS_BATCH, run.seed),
            steps,
            HEADS_FALL.rate,
            run.progress,
        )
    return {"steps": steps, "parameters": sum(p.numel() for p in heads.parameters())}


def count_bigrams(examples: Sequence[SpeechRow]) -> torch.Tensor:  # (P, 3)
    """Frequent pairs of adjacent tokens of speech, and their counts."""
    return select_frequent(Bigrams.count_pairs([row.speech for row in examples]))


def set_bigrams(heads: MultiTokenHeads, counts: torch.Tensor) -> None:  # (P, 3)
    """Replace the table of bigrams."""
    heads.bigrams, heads.config.num_bigrams = counts.clone(), len(counts)


def select_frequent(table: torch.Tensor, min_count: int = 2) -> torch.Tensor:  # (P, 3) -> (P', 3)
    """Bigrams with at least `min_count` occurrences."""
    return table[table[:, 2] >= min_count]


def head_examples(
    examples: Sequence[SpeechRow], batch: int, seed: int
) -> Iterator[TrainingExample]:
    """Endless batches of prompts, padded on the left, and their speech tokens."""
    pad = int(models.speech_layout().begin)
    count = len(examples) // batch * batch
    for numbers in shuffle_batches(count, batch, np.random.default_rng(seed)):
        group = [examples[number] for number in numbers]
        width = max(len(row.prompt) for row in group)
        ids = [[pad] * (width - len(row.prompt)) + row.prompt for row in group]
        mask = [[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in group]
        tokens = pad_sequence(
            [torch.tensor(row.speech) for row in group], batch_first=True, padding_value=-1
        )
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        yield TrainingExample(inputs, tokens)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Word error rates (a target), or tokens per round (draft models)."""
    settings = {"temperature": TEMPERATURE}
    if entry.target is not None:
        target, small = load_teacher(entry.target), load(entry, folder)
        found = {"acceptance_length": acceptance(target, small, CHAIN, count, **settings)}
        if isinstance(small, MultiTokenHeads):
            blocks = accelerate(target, "codec-mtp", drafter=small)
            errors = speech_word_errors(blocks, count, **settings)
            found |= {f"{key}_of_blocks": value for key, value in errors.items()}
        return found
    corpus: list[CorpusUtterance] = make_corpus(max(count // len(ZOO_VOICES), 1), "held-out")
    texts, originals = [one.text for one in corpus], [one.waveform for one in corpus]
    found = speech_word_errors(accelerate(load(entry, folder), "plain"), count, **settings)
    found |= _prefix("espeak", word_error_rate(texts, originals))
    for name in (CODEC, STREAMING_CODEC):
        if (folder / name).is_dir():
            decoded, distance = reconstruct_speech(folder, originals, name)
            kind = name.replace("-", "_")
            found |= _prefix(kind, word_error_rate(texts, decoded))
            found[f"{kind}_log_mel"] = round(distance, 4)
    return found


def _prefix(name: str, figures: dict[str, float]) -> dict[str, float]:
    return {f"{name}_{key}": value for key, value in figures.items()}
