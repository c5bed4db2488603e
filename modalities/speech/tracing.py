"""What a trace of speech shows: the sound, its spectrogram, and frames by round."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec.modalities.speech.spectrogram import measure_levels
from mmspec.modalities.speech.speech_loop import Speech
from mmspec.tracing.media import find_peaks, image_uri, sound_uri

SHADES = ((0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164))  # quiet to loud


def find_processor(formatter: Any) -> Any:
    """None: its tokens are codes of sound."""
    return None


def depict(session: Any, output: Any, trace: Any) -> dict[str, Any]:
    """The view `sound` of generated speech."""
    if not isinstance(output, Speech):
        return {}
    rate = output.sampling_rate
    rows = [
        {
            "wav": sound_uri(waveform, rate),
            "seconds": len(waveform) / rate,
            "peaks": find_peaks(waveform),
            "spectrogram": image_uri(draw_levels(waveform.cpu()), 640),
            "max_hz": rate / 2,
            "frames": rounds.tolist(),
        }
        for waveform, rounds in zip(output.waveforms, output.rounds, strict=True)
    ]
    return {"sound": {"rows": rows}}


def draw_levels(waveform: Tensor) -> Image.Image:  # (S,)
    """A spectrogram whose brightness is the power; high frequencies on top."""
    levels = measure_levels(waveform)
    place = levels * (len(SHADES) - 1)
    low = place.floor().long().clamp(0, len(SHADES) - 2)
    shades = torch.tensor(SHADES, dtype=torch.float32)
    mixed = shades[low] + (place - low)[..., None] * (shades[low + 1] - shades[low])
    return Image.fromarray(mixed.round().byte().numpy(), "RGB")
