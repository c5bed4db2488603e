"""Speech: recognition, and synthesis as codes of one codebook or frames of several.

`recognition` holds Whisper and other models that transcribe audio, `synthesis` language models
whose vocabulary includes codec codes, `frames` models of several codebooks (MusicGen, CSM, Dia).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

from mmspec.modalities.common import TOKEN_PLACEMENT
from mmspec.modality import PICTURE_FILES, Entry, Modality, Source, setting
from mmspec.models.folder import read_json

AUDIO_INPUTS = ("input_features", "input_values")  # prefixes of forward arguments
IMAGE_INPUTS = ("pixel_values",)
CODEC = "codec"  # the folder of the codec, beside the weights of the language model
LAYOUT = "speech_codes"  # the entry of its configuration: see `synthesis.layout.SpeechCodes`
FRAME_MODELS = ("musicgen", "musicgen_melody", "csm", "dia")
UNSUPPORTED_FRAME_MODELS = {
    "moshi": "it has a second audio stream, and its depth decoder has weights per book",
    "higgs_audio_v2": "it alternates between text and frames",
}


def owns_recogniser(source: Source) -> bool:
    """Whether a class generates tokens from audio alone; models with image inputs are vlm's.

    Classes that transformers lists as text to waveform are left to synthesis.
    """
    if source.model_type is None:
        return False
    import transformers
    from transformers.models.auto import modeling_auto

    synthesizers = {*modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES.values()}
    found = (getattr(transformers, name, None) for name in source.classes)
    kind = next((one for one in found if one is not None), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        return False
    if not issubclass(kind, transformers.GenerationMixin):
        return False
    names = inspect.signature(kind.forward).parameters
    has_audio, has_images = (
        any(one.startswith(prefixes) for one in names) for prefixes in (AUDIO_INPUTS, IMAGE_INPUTS)
    )
    return has_audio and not has_images and kind.__name__ not in synthesizers


def owns_codec_language_model(source: Source) -> bool:
    """Whether the configuration of a language model says which of its ids are codec codes."""
    if isinstance(source.given, str | Path):
        file = Path(source.given) / "config.json"
        has_layout = file.is_file() and LAYOUT in read_json(file)
        has_codec = (Path(source.given) / CODEC / "config.json").is_file()
        return has_layout or (has_codec and not owns_frame_model(source))
    config = vars(source.given).get("config") if hasattr(source.given, "__dict__") else None
    return LAYOUT in getattr(config, "__dict__", {})


def owns_frame_model(source: Source) -> bool:
    """Whether frames have several codes; Moshi's inner language model is not included."""
    is_text = any(name.endswith("ForCausalLM") for name in source.classes)
    return source.model_type in (*FRAME_MODELS, *UNSUPPORTED_FRAME_MODELS) and not is_text


@dataclass(frozen=True)
class RecognitionSettings:
    """The audio, its language, and how tokens are sampled."""

    audio: str | None = setting(
        None,
        "An audio file: WAV, or a format that soundfile reads.",
        reads="audio file",
        replaces_prompt=True,
    )
    language: str | None = setting(None, "Language of the speech, such as en; default: detected.")
    task: str | None = setting(
        None,
        "Whisper only: transcribe, or translate to English.",
        choices=("transcribe", "translate"),
    )
    timestamps: bool = setting(False, "Return start and end times (Whisper).")
    max_new_tokens: int | None = setting(
        None, "Maximum new tokens, per 30 seconds.", min=1, max=1 << 16
    )
    temperature: float = setting(0.0, "0 is greedy.", min=0)


@dataclass(frozen=True)
class VoiceSettings:
    """Speaker, duration and sampling; defaults are the model's own."""

    voice: str | None = setting(None, "A speaker by name, where the model has several.")
    max_new_tokens: int | None = setting(
        None, "Maximum number of codes or frames.", min=1, max=1 << 16
    )
    seconds: float | None = setting(None, "Maximum duration in seconds.", min=0, max=86400)
    temperature: float | None = setting(None, "0 is greedy.", min=0)
    top_k: int | None = setting(None, "Sample from the k most likely codes only.", min=1)
    top_p: float | None = setting(None, "Sample from the most likely codes of this mass.", min=0)
    rounds: str | None = setting(
        None,
        "A file for a spectrogram, coloured by how many frames each round accepted.",
        only="generate",
        writes=(".png",),
    )


@dataclass(frozen=True)
class SpeechSettings(VoiceSettings):
    """Codes are sampled by default, because greedy speech tends to loop."""

    repetition_aware: bool = setting(
        False, "Resample repeated codes from the unmodified distribution."
    )


@dataclass(frozen=True)
class FrameModelSettings(VoiceSettings):
    """Defaults are those of the model's generation configuration."""

    guidance: float | None = setting(
        None, "Classifier-free guidance scale, for models that have it; 1 = none.", min=1
    )


MODALITIES = (
    Modality(
        name="asr",
        decodes="tokens",
        recipe="prompt-lookup",
        recipe_with_drafter="whisper-assisted",
        settings=RecognitionSettings,
        package=f"{__name__}.recognition",
        owns=owns_recogniser,
        zoo=Entry.read_entries(f"{__name__}.recognition"),
        files=PICTURE_FILES,
        offers=("speech encoder", "CTC head"),
        parts=("compressor", "kv", "tree", "length", "sees", "check", "processor"),
        placement=TOKEN_PLACEMENT,
    ),
    Modality(
        name="tts",
        decodes="tokens",
        recipe="prompt-lookup",
        recipe_with_drafter="coupled",
        parts_with_drafter={"length": 1},  # the fastest measured: docs/measurements/speech.md
        example_prompt="a large red circle",
        settings=SpeechSettings,
        package=f"{__name__}.synthesis",
        owns=owns_codec_language_model,
        zoo=Entry.read_entries(f"{__name__}.synthesis"),
        files=(".wav",),
        offers=("speech tokens",),
        parts=("codec", "codes", "processor", "tree", "length", "sees", "check"),
        placement=TOKEN_PLACEMENT,
    ),
    Modality(
        name="frames",
        decodes="frames",
        recipe="frame-lookup",
        recipe_with_drafter="frame-coupled",
        settings=FrameModelSettings,
        package=f"{__name__}.frames",
        owns=owns_frame_model,
        files=(".wav",),
        parts=("processor", "length"),
        placement=TOKEN_PLACEMENT,
        plain=("frame-plain", {}),
        unsupported_models=UNSUPPORTED_FRAME_MODELS,
    ),
)
