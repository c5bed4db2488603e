"""The survey runs multimodal classes with an image or a sound, not with text alone."""

from __future__ import annotations

import pytest

from mmspec.modalities.vlm import survey
from tests.covering import limited

ASKED = {
    "Florence2ForConditionalGeneration": "pixel_values",  # its encoder reads words and picture
    "LlavaNextForConditionalGeneration": "pixel_values, image_sizes",
    "Qwen2AudioForConditionalGeneration": "input_features, feature_attention_mask",
    "AriaForConditionalGeneration": "pixel_values",
    "AudioFlamingo3ForConditionalGeneration": "input_features, input_features_mask",
    "AyaVisionForConditionalGeneration": "pixel_values, image_sizes",
    "DeepseekVLHybridForConditionalGeneration": "pixel_values, high_res_pixel_values",
    "Lfm2VlForConditionalGeneration": "pixel_values, spatial_shapes, pixel_attention_mask",
    "Llama4ForConditionalGeneration": "pixel_values",
    "LlavaNextVideoForConditionalGeneration": "pixel_values, image_sizes",
    "LlavaOnevisionForConditionalGeneration": "pixel_values, image_sizes",
    "Mistral3ForConditionalGeneration": "pixel_values, image_sizes",
    "MistralLarge4ForConditionalGeneration": "pixel_values, image_sizes",
    "MossTranscribeDiarizeForConditionalGeneration": (
        "input_features, input_features_mask, padding_mask"
    ),
    "MusicFlamingoForConditionalGeneration": "input_features, input_features_mask",
    "VideoLlama3ForConditionalGeneration": "pixel_values, image_grid_thw, image_merge_sizes",
    "VipLlavaForConditionalGeneration": "pixel_values",
    "VoxtralForConditionalGeneration": "input_features",
}


@pytest.mark.parametrize(
    "name",
    limited(
        [
            name if at < 3 else pytest.param(name, marks=pytest.mark.slow)
            for at, name in enumerate(ASKED)
        ],
        2,
    ),
)
def test_a_class_gets_its_media(name: str) -> None:
    line = survey.measure_class(name, survey.classes()[name])
    assert set(line.asked.split(", ")) == set(ASKED[name].split(", "))
    assert line.verdict in ("accepted", "chain only"), line
