"""From what is typed to tensors, and from tokens to words: language models and their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec import _hf
from mmspec.modalities.common import doctor_tokens, formatting
from mmspec.modalities.common.families import family, reader
from mmspec.modalities.common.pictures import open_picture
from mmspec.modalities.vlm import LanguageSettings, clips
from mmspec.modalities.vlm.plug import load, session
from mmspec.modality import Finding
from mmspec.targets.readers.visual import FRAMES
from mmspec.zoo import moving

SCENE, CLIP = "zoo:scene", "zoo:clip"
BUNDLED = Path(str(files("mmspec"))) / "zoo" / "scene.png"


class LanguageFormatter:
    """Asks one model, about a picture, a clip or both where the settings name them."""

    def __init__(self, source: str, model: Any, settings: LanguageSettings, **options: Any) -> None:
        media = family(model).media
        self.sees = "pixel_values" in media
        if media and not self.sees:
            raise ValueError(
                f"{source} takes {', '.join(media)}, which a command line cannot give; call "
                "mmspec.accelerate(model).generate() from Python"
            )
        if settings.image is not None and not self.sees:
            raise ValueError(
                f"{source} is a text model and takes no picture; drop --image or choose another "
                "model"
            )
        _check_filming(source, model, settings)
        self.source, self.model, self.settings = source, model, settings
        self.picture = None if settings.image is None else _picture(settings.image)
        self.films = [] if settings.video is None else [_clip(settings)]
        self.processor = formatting.processor(source, model, self.sees, **options)

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of every call."""
        settings = self.settings
        made: dict[str, Any] = {"do_sample": settings.temperature > 0}
        if settings.temperature > 0:
            made["temperature"] = settings.temperature
        return {**made, "max_new_tokens": settings.max_new_tokens}

    def request(
        self,
        prompts: Sequence[str],
        images: Sequence[Image.Image] | None = None,
        films: Sequence[clips.VideoClip] | None = None,
    ) -> dict[str, Any]:
        """Tensors of the prompts on the model's device, padded on the left, and the sampling.

        `images` and `films` are one per prompt, in the place of the one of the settings.
        """
        if images is None and self.picture is not None:
            images = [self.picture] * len(prompts)
        films = self.films * len(prompts) if films is None else films
        kinds = [kind for kind, given in (("image", images), ("video", films)) if given]
        texts = [chat(self.processor, one, kinds) for one in formatting.checked(prompts)]
        if self.sees:
            seen = clips.shown(films) if films else {}
            made = self.processor(
                text=texts, images=images, **seen, padding=True, return_tensors="pt"
            )
        else:
            made = self.processor(texts, padding=True, return_tensors="pt")
            made.pop("token_type_ids", None)
        device = self.model.get_input_embeddings().weight.device
        made = {name: value.to(device) for name, value in made.items()}
        if films:
            self._check_room(made["input_ids"].shape[1])
        return {**made, **self.sampling}

    def _check_room(self, length: int) -> None:
        """Refuse a clip that is longer than what the model was made for. Raises ValueError."""
        config = self.model.config.get_text_config(decoder=True)
        most: int | None = getattr(config, "max_position_embeddings", None)
        room = self.settings.max_new_tokens
        if most is not None and length + room > most:
            raise ValueError(
                f"the prompt has {length} tokens, and {self.source} is made for {most} with the "
                f"{room} new ones; give fewer --frames"
            )

    def text(self, output: Any) -> str:
        """The answer to a single prompt."""
        words = formatting.tokenizer(self.processor)
        return str(words.decode(answer(output), skip_special_tokens=True)).strip()

    def data(self, output: Any) -> dict[str, Any]:
        """The new tokens of a single prompt."""
        return {"tokens": answer(output)}

    def render(self, output: Any, path: Path) -> tuple[Path, ...]:
        """Writes nothing: the answer is a text."""
        return ()


def answer(output: Any) -> list[int]:
    """New tokens of the one row of an `Output`."""
    tokens: list[int] = output.sequences[0, -output.stats.num_new_tokens :].tolist()
    return tokens


def chat(processor: Any, prompt: str, kinds: Sequence[str]) -> str:
    """A prompt in the model's chat form; as it is where the model has none.

    `kinds` are what stands before the words: "image", "video".
    """
    is_tokenizer = formatting.tokenizer(processor) is processor
    if processor.chat_template:
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": prompt}]
        turn = {"role": "user", "content": prompt if is_tokenizer else content}
        made = processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
        return str(made)
    named = {} if is_tokenizer else vars(processor)
    marks = [named.get(f"{kind}_token", f"<{kind}>") for kind in kinds]
    return "\n".join([*marks, prompt])


def _check_filming(source: str, model: Any, settings: LanguageSettings) -> None:
    """Refuse frames of no clip, and a clip for a model that reads none. Raises ValueError."""
    if settings.video is None:
        if settings.frames is not None or settings.fps is not None:
            raise ValueError("--frames and --fps are of a clip; give --video, or drop them")
    elif FRAMES not in _hf.forward_names(model):
        raise ValueError(
            f"{source} reads no video; drop --video, or choose a model that does, such as "
            "zoo:qwen2.5-vl"
        )


def _clip(settings: LanguageSettings) -> clips.VideoClip:
    assert settings.video is not None
    if settings.video == CLIP:
        return of_the_zoo(moving.BUNDLED_CLIP.render(), settings)
    return clips.read(settings.video, settings.frames, settings.fps)


def of_the_zoo(frames: Sequence[Image.Image], settings: LanguageSettings) -> clips.VideoClip:
    """A clip of moving scenes: all of its frames, or those that the settings ask for."""
    count = settings.frames or (None if settings.fps else moving.FRAMES)
    return clips.read(frames, count, settings.fps, moving.RATE_HZ)


def _picture(source: str) -> Image.Image:
    """A picture from a file, or the zoo's own scene. Raises ValueError naming what is damaged."""
    path = BUNDLED if source == SCENE else Path(source)
    if not path.is_file():
        raise ValueError(f"there is no picture {source}; give a file, or {SCENE} for a bundled one")
    return open_picture(path)


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A draft model or head for a model. Raises ValueError for what is neither."""
    return formatting.load_drafter(model, source, load, **options)


formatter = LanguageFormatter


def examine(target: str, drafter: str | None) -> list[Finding]:
    """What can be said of a model, or of a pair, without reading weights."""
    return doctor_tokens.examine(target, drafter, session, reader)
