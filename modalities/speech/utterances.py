"""Utterances of Scene world sentences, synthesized by espeak-ng in several voices.

espeak-ng is a system program (`apt install espeak-ng`), needed only to create speech; some
recordings are bundled (`mmspec.modalities.speech.recordings`).
"""

from __future__ import annotations

import io
import subprocess
import wave
from dataclasses import dataclass
from shutil import which

import numpy as np
import torch
import torchaudio.functional
from torch import Tensor

from mmspec.modalities.speech.sentences import sentence
from mmspec.zoo.scene import Split

RATE_HZ = 16_000
LANGUAGES = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland")
SPEAKER_VARIANTS = ("", "+f1", "+f2", "+f3", "+f4", "+m1", "+m3", "+m4", "+m6", "+m7")
_SILENCE_LEVEL = 0.02  # of the largest sample; quieter edges of a sentence are trimmed


@dataclass(frozen=True)
class Voice:
    """A language and speaker variant of espeak-ng, words per minute, and pitch (0 to 99)."""

    name: str = "en-us"
    speed_wpm: int = 175
    pitch: int = 50


ZOO_VOICES = {
    "paul": Voice("en-us"),
    "ada": Voice("en-us+f3"),
}  # of the bundled codec language models


@dataclass(frozen=True)
class RecordingConditions:
    """Silence around the speech, amplitude, and noise; the largest sample is scaled to `peak`."""

    lead_s: float = 0.1
    tail_s: float = 0.2
    peak: float = 0.5
    snr_db: float = float("inf")


@dataclass(frozen=True)
class Utterance:
    """A waveform (T,) in [-1, 1] at `RATE_HZ`, its text, and the start and end of the speech."""

    waveform: Tensor
    text: str
    start_s: float
    end_s: float
    voice: Voice


def utterance(
    seed: int,
    split: Split = "train",
    voice: Voice | None = None,
    room: RecordingConditions | None = None,
) -> Utterance:
    """A sentence, voice and recording conditions sampled from the seed, unless given.

    Raises RuntimeError if espeak-ng is missing.
    """
    generator = np.random.default_rng((seed, 8, split == "held-out"))
    text = sentence(seed, split)
    # both are sampled, so that giving one does not change the other
    sampled = _sample_voice(generator), _sample_recording(generator)
    voice, room = voice or sampled[0], room or sampled[1]
    speech = synthesize(text, voice)
    lead = round(room.lead_s * RATE_HZ)
    waveform = torch.zeros(lead + len(speech) + round(room.tail_s * RATE_HZ))
    waveform[lead : lead + len(speech)] = speech * (room.peak / speech.abs().max())
    power = waveform[lead : lead + len(speech)].square().mean().sqrt()
    noise = torch.from_numpy(generator.standard_normal(len(waveform))).float()
    waveform = (waveform + noise * power * 10 ** (-room.snr_db / 20)).clamp(-1, 1)
    return Utterance(waveform, text, room.lead_s, (lead + len(speech)) / RATE_HZ, voice)


def cycle_speakers(number: int) -> list[str]:
    """Names of `ZOO_VOICES` in turn."""
    return [list(ZOO_VOICES)[index % len(ZOO_VOICES)] for index in range(number)]


def synthesize(text: str, voice: Voice | None = None) -> Tensor:  # -> (T,) at RATE_HZ
    """Speech of espeak-ng, without silence around it. Raises RuntimeError if it is missing."""
    if which("espeak-ng") is None:
        raise RuntimeError(
            "espeak-ng, which synthesizes the training data, is not installed; install it (apt "
            "install espeak-ng), or use mmspec.modalities.speech.recordings"
        )
    voice = voice or Voice()
    options = ("-v", voice.name, "-s", str(voice.speed_wpm), "-p", str(voice.pitch))
    command = ["espeak-ng", *options, "--stdout", "--", text]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        reason = done.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"espeak-ng does not synthesize {text!r} as {voice}: {reason}")
    with wave.open(io.BytesIO(done.stdout)) as file:
        rate_hz = file.getframerate()
    samples = np.frombuffer(done.stdout[44:], dtype="<i2")  # the header lacks the length
    waveform = torch.from_numpy(samples / np.float32(1 << 15))
    resampled: Tensor = torchaudio.functional.resample(waveform, rate_hz, RATE_HZ)
    loud = (resampled.abs() > _SILENCE_LEVEL * resampled.abs().max()).nonzero()
    return resampled[int(loud[0]) : int(loud[-1]) + 1]


def _sample_voice(generator: np.random.Generator) -> Voice:
    language = LANGUAGES[generator.integers(len(LANGUAGES))]
    speaker = SPEAKER_VARIANTS[generator.integers(len(SPEAKER_VARIANTS))]
    speed, pitch = int(generator.integers(160, 221)), int(generator.integers(30, 71))
    return Voice(language + speaker, speed, pitch)


def _sample_recording(generator: np.random.Generator) -> RecordingConditions:
    lead, tail = generator.uniform(0.04, 0.3), generator.uniform(0.08, 0.4)
    peak, is_clean = generator.uniform(0.15, 0.9), generator.random() < 0.5
    snr = generator.uniform(20, 40)
    return RecordingConditions(
        round(lead, 3), round(tail, 3), peak, float("inf") if is_clean else snr
    )
