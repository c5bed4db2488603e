"""Convert command-line prompts, images and clips to model inputs, and tokens to text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec import _hf
from mmspec._hf_cache import execution_device
from mmspec.distributions.grammar import Grammar
from mmspec.errors import prefix_errors
from mmspec.modalities.common import doctor, doctor_tokens, formatting
from mmspec.modalities.common.chat_template import apply_chat_template
from mmspec.modalities.common.families import find_family, make_reader
from mmspec.modalities.common.formatting import open_image
from mmspec.modalities.vlm import LanguageSettings, clips
from mmspec.modalities.vlm.plug import load, session
from mmspec.modality import Finding
from mmspec.targets.readers.visual import FRAMES
from mmspec.zoo import motion as moving

SCENE, CLIP = "zoo:scene", "zoo:clip"
Exchange = tuple[str, str]  # a prompt and its answer
BUNDLED_IMAGE = Path(str(files("mmspec"))) / "zoo" / "scene.png"


class LanguageFormatter:
    """Formatter of one model; the settings may name an image, a clip or both."""

    def __init__(self, source: str, model: Any, settings: LanguageSettings, **options: Any) -> None:
        media = find_family(model).media
        self.sees = "pixel_values" in media
        if media and not self.sees:
            raise ValueError(
                f"{source} takes {', '.join(media)}, which the command line does not support; call "
                "mmspec.accelerate(model).generate() from Python"
            )
        if settings.image is not None and not self.sees:
            raise ValueError(
                f"{source} is a text model and takes no image; drop --image or choose another model"
            )
        _check_video(source, model, settings)
        self.source, self.model, self.settings = source, model, settings
        self.picture = None if settings.image is None else _open_image(settings.image)
        self.videos = [] if settings.video is None else [_read_clip(settings)]
        self.processor = formatting.load_processor(source, model, self.sees, **options)
        self.grammar = _read_grammar(settings, formatting.get_tokenizer(self.processor))

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of every call."""
        settings = self.settings
        made: dict[str, Any] = {"do_sample": settings.temperature > 0}
        if settings.temperature > 0:
            made["temperature"] = settings.temperature
        if self.grammar is not None:
            made["grammar"] = self.grammar
        return {**made, "max_new_tokens": settings.max_new_tokens}

    def request(
        self,
        prompts: Sequence[str],
        images: Sequence[Image.Image] | None = None,
        videos: Sequence[clips.VideoClip] | None = None,
        turns: Sequence[Sequence[Exchange]] | None = None,
    ) -> dict[str, Any]:
        """Return inputs of the prompts on the model's device, padded on the left, and settings.

        `images` and `videos`, one per prompt, replace those of the settings; `turns` are earlier
        ones of each conversation. Raises ValueError for media that the model does not read.
        """
        if images is None and self.picture is not None:
            images = [self.picture] * len(prompts)
        videos = self.videos * len(prompts) if videos is None else videos
        if videos:
            _check_reads_video(self.source, self.model)
        if images and not self.sees:
            raise ValueError(
                f"{self.source} is a text model and takes no image; drop it or choose another model"
            )
        kinds = [kind for kind, given in (("image", images), ("video", videos)) if given]
        earlier: Sequence[Sequence[Exchange]] = [()] * len(prompts) if turns is None else turns
        texts = [
            format_chat(self.processor, prompt, kinds, before)
            for prompt, before in zip(formatting.check_prompts(prompts), earlier, strict=True)
        ]
        if self.sees:
            video = clips.processor_arguments(videos) if videos else {}
            try:
                made = self.processor(
                    text=texts, images=images, **video, padding=True, return_tensors="pt"
                )
            except ValueError as error:
                raise ValueError(
                    f"prompt: {error} (give a text without image tokens; --image adds them)"
                ) from error
        else:
            made = self.processor(texts, padding=True, return_tensors="pt")
            made.pop("token_type_ids", None)
        device = execution_device(self.model.get_input_embeddings())
        made = {name: value.to(device) for name, value in made.items()}
        if videos:
            self._check_length(made["input_ids"].shape[1])
        return {**made, **self.sampling}

    def _check_length(self, length: int) -> None:
        """Refuse a clip that exceeds `max_position_embeddings`. Raises ValueError."""
        config = self.model.config.get_text_config(decoder=True)
        limit: int | None = getattr(config, "max_position_embeddings", None)
        new = self.settings.max_new_tokens
        if limit is not None and length + new > limit:
            raise ValueError(
                f"the prompt has {length} tokens, but {self.source} takes at most {limit} with the "
                f"{new} new ones; give fewer --frames"
            )

    def text(self, output: Any) -> str:
        """Decode the new tokens of a single prompt."""
        tokenizer = formatting.get_tokenizer(self.processor)
        return str(tokenizer.decode(new_token_ids(output), skip_special_tokens=True)).strip()

    def data(self, output: Any) -> dict[str, Any]:
        """Return the new tokens of a single prompt."""
        return {"tokens": new_token_ids(output)}

    def render(self, output: Any, path: Path) -> tuple[Path, ...]:
        """Write no files: the output is text."""
        return ()


def new_token_ids(output: Any) -> list[int]:
    """Return the new tokens of an `Output` of one row."""
    tokens: list[int] = output.sequences[0, -output.stats.num_new_tokens :].tolist()
    return tokens


def format_chat(
    processor: Any, prompt: str, kinds: Sequence[str], turns: Sequence[Exchange] = ()
) -> str:
    """Format a prompt with the model's chat template, if it has one.

    `kinds` are the media before the first text: "image", "video"; `turns` are earlier ones.
    """
    is_tokenizer = formatting.get_tokenizer(processor) is processor
    prompts = [*(text for text, _ in turns), prompt]
    if processor.chat_template:
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": prompts[0]}]
        messages: list[Any] = [{"role": "user", "content": prompts[0] if is_tokenizer else content}]
        for (_, answer), text in zip(turns, prompts[1:], strict=True):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": text})
        options = {"add_generation_prompt": True, "tokenize": False}
        return str(apply_chat_template(processor, messages, **options))
    named = {} if is_tokenizer else vars(processor)
    marks = [named.get(f"{kind}_token", f"<{kind}>") for kind in kinds]
    return "\n".join([*marks, *(text for turn in turns for text in turn), prompt])


def _read_grammar(settings: LanguageSettings, tokenizer: Any) -> Grammar | None:
    """The grammar of the settings' file. Raises ValueError for two, and for one that is refused."""
    if settings.json_schema is not None and settings.grammar is not None:
        raise ValueError("--json-schema and --grammar are two grammars of one output; drop one")
    for name, make in (("json_schema", Grammar.json_schema), ("grammar", Grammar.ebnf)):
        file = getattr(settings, name)
        if file is not None:
            with prefix_errors(file):
                return make(Path(file).read_text(), tokenizer=tokenizer)
    return None


def _check_video(source: str, model: Any, settings: LanguageSettings) -> None:
    """Refuse --frames without a clip, and a clip for another model. Raises ValueError."""
    if settings.video is None:
        if settings.frames is not None or settings.fps is not None:
            raise ValueError("--frames and --fps need a clip; give --video, or drop them")
    else:
        _check_reads_video(source, model)


def _check_reads_video(source: str, model: Any) -> None:
    """Refuse a clip for a model of images or text. Raises ValueError."""
    if FRAMES not in _hf.forward_names(model):
        raise ValueError(
            f"{source} reads no video; drop --video, or choose a model that does, such as "
            "zoo:qwen2.5-vl"
        )


def _read_clip(settings: LanguageSettings) -> clips.VideoClip:
    assert settings.video is not None
    if settings.video == CLIP:
        return read_scene_clip(moving.BUNDLED_CLIP, settings)
    return clips.read(settings.video, settings.frames, settings.fps)


def read_scene_clip(scene: moving.MovingScene, settings: LanguageSettings) -> clips.VideoClip:
    """Read a clip of moving scenes: at its own rate, or at the one that the settings ask for."""
    count = settings.frames or (None if settings.fps else moving.FRAMES)
    wanted = (count or 0) / moving.FRAMES, (settings.fps or 0) / moving.RATE_HZ
    rate = min(max(1, math.ceil(max(wanted))), moving.MAX_RATE)
    return clips.read(scene.render(rate=rate), count, settings.fps, rate * moving.RATE_HZ)


def _open_image(source: str) -> Image.Image:
    """Open an image file, or the bundled scene. Raises ValueError for an unreadable file."""
    path = BUNDLED_IMAGE if source == SCENE else Path(source)
    if not path.is_file():
        raise ValueError(f"there is no image {source}; give a file, or {SCENE} for a bundled one")
    return open_image(path)


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """Load a draft model or head. Raises ValueError for any other folder."""
    return formatting.load_drafter(model, source, load, make_reader, **options)


formatter = LanguageFormatter


def examine(target: str, drafter: str | None) -> list[Finding]:
    """Check a model, or a pair of models, without loading weights."""
    found = doctor_tokens.examine(target, drafter, session, make_reader)
    return found if doctor.is_refused(found) else [*found, _examine_processor(target)]


def _examine_processor(target: str) -> Finding:
    """Whether the commands can make inputs of prompts and images."""
    model = doctor_tokens.skeleton(target)
    sees = "pixel_values" in find_family(model).media
    check = "processor" if sees else "tokenizer"
    try:
        found = formatting.load_processor(target, model, sees)
    except ValueError:
        remark = (
            "none can be loaded: the commands need one, generate() in Python takes your own inputs"
        )
        return Finding(check, None, None, "note", remark)
    return Finding(check, type(found).__name__, None)
