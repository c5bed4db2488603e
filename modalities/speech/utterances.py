"""The Scene world, spoken: what espeak-ng says, in several voices, and how it was recorded.

espeak-ng is a program of the system (`apt install espeak-ng`), needed only to make speech; some
recordings come with the package (`mmspec.modalities.speech.recordings`).
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
SPEAKERS = ("", "+f1", "+f2", "+f3", "+f4", "+m1", "+m3", "+m4", "+m6", "+m7")
_AUDIBLE = 0.02  # of the loudest sample; what is softer before and after a sentence is cut off


@dataclass(frozen=True)
class Voice:
    """Who speaks: a language and speaker of espeak-ng, words per minute, and pitch (0 to 99)."""

    name: str = "en-us"
    speed_wpm: int = 175
    pitch: int = 50


@dataclass(frozen=True)
class Room:
    """How speech is recorded. The loudest sample gets to `peak`; no noise at infinite `snr_db`."""

    lead_s: float = 0.1
    tail_s: float = 0.2
    peak: float = 0.5
    snr_db: float = float("inf")


@dataclass(frozen=True)
class Utterance:
    """What was said, (T,) in [-1, 1] at `RATE_HZ`, and from when to when."""

    waveform: Tensor
    text: str
    start_s: float
    end_s: float
    voice: Voice


def utterance(
    seed: int, split: Split = "train", voice: Voice | None = None, room: Room | None = None
) -> Utterance:
    """A sentence in a voice and a room, all of them drawn by the seed unless given.

    Raises RuntimeError where espeak-ng is missing.
    """
    generator = np.random.default_rng((seed, 8, split == "held-out"))
    text = sentence(seed, split)
    drawn = _voice(generator), _room(generator)  # both, so that giving one leaves the other alone
    voice, room = voice or drawn[0], room or drawn[1]
    spoken = speak(text, voice)
    lead = round(room.lead_s * RATE_HZ)
    waveform = torch.zeros(lead + len(spoken) + round(room.tail_s * RATE_HZ))
    waveform[lead : lead + len(spoken)] = spoken * (room.peak / spoken.abs().max())
    power = waveform[lead : lead + len(spoken)].square().mean().sqrt()
    noise = torch.from_numpy(generator.standard_normal(len(waveform))).float()
    waveform = (waveform + noise * power * 10 ** (-room.snr_db / 20)).clamp(-1, 1)
    return Utterance(waveform, text, room.lead_s, (lead + len(spoken)) / RATE_HZ, voice)


def speak(text: str, voice: Voice | None = None) -> Tensor:  # -> (T,) at RATE_HZ
    """What espeak-ng says, without the silence around it. Raises RuntimeError if it is missing."""
    if which("espeak-ng") is None:
        raise RuntimeError(
            "espeak-ng is not on this machine, and it speaks the training data; install it (apt "
            "install espeak-ng), or take mmspec.modalities.speech.recordings"
        )
    voice = voice or Voice()
    manner = ("-v", voice.name, "-s", str(voice.speed_wpm), "-p", str(voice.pitch))
    command = ["espeak-ng", *manner, "--stdout", "--", text]
    said = subprocess.run(command, capture_output=True, check=False)
    if said.returncode or not said.stdout:
        reason = said.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"espeak-ng does not say {text!r} as {voice}: {reason}")
    with wave.open(io.BytesIO(said.stdout)) as file:
        rate_hz = file.getframerate()
    samples = np.frombuffer(said.stdout[44:], dtype="<i2")  # the header does not know the length
    heard = torch.from_numpy(samples / np.float32(1 << 15))
    spoken: Tensor = torchaudio.functional.resample(heard, rate_hz, RATE_HZ)
    loud = (spoken.abs() > _AUDIBLE * spoken.abs().max()).nonzero()
    return spoken[int(loud[0]) : int(loud[-1]) + 1]


def _voice(generator: np.random.Generator) -> Voice:
    language = LANGUAGES[generator.integers(len(LANGUAGES))]
    speaker = SPEAKERS[generator.integers(len(SPEAKERS))]
    speed, pitch = int(generator.integers(160, 221)), int(generator.integers(30, 71))
    return Voice(language + speaker, speed, pitch)


def _room(generator: np.random.Generator) -> Room:
    lead, tail = generator.uniform(0.04, 0.3), generator.uniform(0.08, 0.4)
    peak, is_clean = generator.uniform(0.15, 0.9), generator.random() < 0.5
    snr = generator.uniform(20, 40)
    return Room(round(lead, 3), round(tail, 3), peak, float("inf") if is_clean else snr)
