"""Helpers of formatters: checked prompts, images, and processors without remote code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, ProcessorMixin

from mmspec import _hf
from mmspec._hf_cache import is_spread
from mmspec.modalities.common import doctor_tokens
from mmspec.modalities.common.doctor_tokens import find_head_kind
from mmspec.registry import ZOO
from mmspec.targets.readers.reader import Reader
from mmspec.zoo import path

MAX_PIXELS = 64_000_000  # of an image file


def check_prompts(prompts: Sequence[str]) -> list[str]:
    """Return the prompts. Raises ValueError for an empty one."""
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise ValueError("the prompt is empty; give --prompt some text")
    return list(prompts)


def parse_class(prompt: str) -> int:
    """Parse the prompt of a class-conditional model. Raises ValueError for text."""
    if not prompt.strip().isdigit():
        raise ValueError(f"this model generates classes; give --prompt a number, not {prompt!r}")
    return int(prompt)


def open_image(source: str | Path | BytesIO, name: str | None = None) -> Image.Image:
    """Open an image as RGB. Raises ValueError naming a file (or `name`) that cannot be read."""
    try:
        image = Image.open(source)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels")
        return convert_to_rgb(image)
    except Exception as error:  # damaged files raise whatever their decoder raises
        raise ValueError(
            f"{name or source} is not an image that can be read ({error}); give a PNG or JPEG file "
            f"of at most {MAX_PIXELS / 1e6:g} million pixels"
        ) from error


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """The image as RGB; what is transparent is white, as on paper."""
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
    return image if image.mode == "RGB" else image.convert("RGB")


def load_processor(source: str, model: Any, sees: bool, trust_remote_code: bool = False) -> Any:
    """Load the processor, or the tokenizer, of a model, with padding on the left.

    Raises ValueError if there is none, or if it would run remote code.
    """
    auto: Any = AutoProcessor if sees else AutoTokenizer
    what = "processor" if sees else "tokenizer"
    try:
        found = auto.from_pretrained(get_source(source, model), trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files raise whatever their reader raises
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{source} has no {what} that can be loaded ({reason}); give a model with its {what}, "
            "and a head as its drafter"
        ) from error
    tokenizer = get_tokenizer(found)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return found


def get_tokenizer(found: Any) -> Any:
    """Return the tokenizer of a processor; a tokenizer is returned unchanged."""
    return found.tokenizer if isinstance(found, ProcessorMixin) else found


def get_source(source: str, model: Any) -> str:
    """Return the folder or name that a model was loaded from; default: `source`."""
    return str(model.config._name_or_path or source)


def load_drafter(
    model: Any,
    source: str | Path,
    load: Callable[..., Any],
    make_reader: Callable[[Any], Reader],
    **options: Any,
) -> Any:
    """A head of any kind for a model of tokens, or what `load` makes of a folder or a name.

    Raises ValueError for anything else.
    """
    placement = options.get("placement")
    name = str(source)
    is_placed_head = placement is not None and name.startswith(ZOO)
    folder = path(name.removeprefix(ZOO)) if is_placed_head else Path(source)
    kind = find_head_kind(folder) if folder.is_dir() else None
    if kind is not None:  # bound to the target, it takes the target's device and dtype
        return kind.load(folder, make_reader(model))
    small = load(source, **options)
    if is_spread(model) and (placement is None or placement.device is None):
        small = small.to(make_reader(model).device)
    if not isinstance(_hf.unwrap_compiled(small), PreTrainedModel):
        raise ValueError(
            f"{source} holds a {type(small).__name__}, no model of tokens; give a smaller one with "
            "the target's tokenizer"
        )
    return small


def skeleton(source: str) -> Any:
    """Build a token model on the meta device, to check arguments before weights are loaded."""
    return doctor_tokens.skeleton(_folder(source))


def skeleton_of_config(source: str) -> Any:
    """As `skeleton`, also of a folder that holds a configuration and no weights."""
    name = _folder(source)
    is_bare = Path(name).is_dir() and not any(Path(name).glob("*.safetensors"))
    return doctor_tokens.skeleton_of_config(name) if is_bare else doctor_tokens.skeleton(name)


def _folder(source: str) -> str:
    """The folder of a bundled model; other names are returned unchanged."""
    is_zoo = source.startswith(ZOO)
    return str(path(source.removeprefix(ZOO))) if is_zoo else source
