"""From what a user types to models and tensors: pairs, pictures, prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

MODEL = "zoo:vlm"
SCENE = "zoo:scene"


@dataclass(frozen=True)
class Pair:
    """A target with its processor, and the recipe's draft model if it takes one."""

    model: Any
    recipe: str
    drafter: Any | None
    names: tuple[str, str | None]  # as typed: target, drafter

    @cached_property
    def processor(self) -> Any:
        """The target's processor; of a text model, its tokenizer."""
        return load_processor(self.names[0], self.sees)

    @property
    def sees(self) -> bool:
        """Whether the target takes pictures."""
        from mmspec.modalities import families

        return bool(families.family(self.model).media)

    @property
    def is_zoo(self) -> bool:
        return self.names[0].startswith("zoo:")


def load_pair(model: str, drafter: str | None, recipe: str | None) -> Pair:
    """Load a target and, where the recipe takes one, its draft model (the zoo's own by default)."""
    from mmspec.modalities.vlm.plug import load as load_model

    recipe, drafter = choose(model, drafter, recipe)
    target = load_model(present(model))
    small = None if drafter is None else load_model(present(drafter))
    if drafter is not None and _sizes_agree(target, small):
        _refuse_other_words(model, drafter)
    return Pair(target, recipe, small, (model, drafter))


def _sizes_agree(target: Any, small: Any) -> bool:
    """Whether two vocabularies differ by padding at most; `accelerate` refuses the others."""
    from mmspec.drafters.neural.small_model import VOCABULARY_PADDING

    ours, theirs = (model.config.get_text_config().vocab_size for model in (target, small))
    return bool(abs(ours - theirs) <= VOCABULARY_PADDING)


def _refuse_other_words(model: str, drafter: str) -> None:
    from mmspec.cli.checks import tokenizers

    found = tokenizers([model, drafter])
    if found.verdict == "refused":
        raise ValueError(
            f"{drafter} cannot draft for {model}: {found.remark}; choose a draft model with the "
            "target's tokenizer"
        )


def shape(length: str | None, tree: str | None) -> dict[str, Any]:
    """`--length` and `--tree` as `accelerate` takes them."""
    parts: dict[str, Any] = {}
    if length is not None:
        parts["length"] = int(length) if length.isdigit() else length
    if tree is not None:
        widths = tree.split(",")
        parts["tree"] = [int(w) for w in widths] if all(w.isdigit() for w in widths) else tree
    return parts


def choose(model: str, drafter: str | None, recipe: str | None) -> tuple[str, str | None]:
    """The recipe and the draft model that go with what was typed."""
    from mmspec import recipes

    default = default_drafter(model)
    if recipe is None:
        recipe = "coupled" if drafter or default else "prompt-lookup"
    plan = recipes.get(recipe)
    if not plan.takes_drafter:
        if drafter is not None:
            raise ValueError(f"recipe {recipe!r} takes no draft model; drop --drafter")
        return recipe, None
    drafter = drafter or default_drafter(model, plan.sees)
    if drafter is None:
        raise ValueError(f"recipe {recipe!r} needs a draft model; give --drafter DIR or zoo:NAME")
    return recipe, drafter


def default_drafter(model: str, sees: str = "auto") -> str | None:
    """The zoo's draft model for one of its targets: one that sees as much, if there is one."""
    if not model.startswith("zoo:"):
        return None
    from mmspec import zoo

    target = zoo.info(model.removeprefix("zoo:"))
    for name in zoo.names():
        entry = zoo.info(name)
        if entry.target == target.name and entry.sees == sees:
            return f"zoo:{name}"
    return None if target.drafter is None else f"zoo:{target.drafter}"


def knobs(pairs: Sequence[str] | None) -> dict[str, Any]:
    """`--set NAME=VALUE` as `accelerate` takes it: numbers, true, false and lists, else words."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError(f"--set {pair} gives no value; write NAME=VALUE, as in --set order=2")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def load_processor(name: str, sees: bool) -> Any:
    """A model's processor or tokenizer, padding on the left."""
    from transformers import AutoProcessor, AutoTokenizer

    auto: Any = AutoProcessor if sees else AutoTokenizer
    try:
        processor = auto.from_pretrained(folder(name))
    except (OSError, ValueError, ImportError) as error:
        what = "processor" if sees else "tokenizer"
        raise ValueError(f"{name} has no {what} that can be loaded: {error}") from error
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


def folder(name: str) -> str:
    """Where a model named on the command line lies."""
    if not name.startswith("zoo:"):
        return name
    from mmspec import zoo

    return str(zoo.path(name.removeprefix("zoo:")))


def encode(pair: Pair, prompt: str, image: str | None) -> dict[str, Any]:
    """The tensors of one request, on the model's device."""
    return encode_batch(pair, [prompt], image)


def encode_batch(pair: Pair, prompts: Sequence[str], image: str | None) -> dict[str, Any]:
    """The tensors of several prompts about one picture, padded on the left."""
    if not all(prompt.strip() for prompt in prompts):
        raise ValueError("the prompt is empty; give --prompt some text")
    if image is not None and not pair.sees:
        raise ValueError(
            f"{pair.names[0]} is a text model and takes no picture; drop --image or choose "
            "another model"
        )
    texts = [chat(pair.processor, prompt, image is not None) for prompt in prompts]
    if pair.sees:
        pictures = None if image is None else [open_image(image)] * len(texts)
        made = pair.processor(text=texts, images=pictures, padding=True, return_tensors="pt")
    else:
        made = pair.processor(texts, padding=True, return_tensors="pt")
        made.pop("token_type_ids", None)
    device = pair.model.get_input_embeddings().weight.device
    return {name: value.to(device) for name, value in made.items()}


def chat(processor: Any, prompt: str, has_image: bool) -> str:
    """A prompt in the model's chat form; as it is where the model has none."""
    if getattr(processor, "chat_template", None):
        parts = [{"type": "image"}] if has_image else []
        content = [*parts, {"type": "text", "text": prompt}]
        has_parts = hasattr(processor, "image_processor")
        turn = {"role": "user", "content": content if has_parts else prompt}
        made = processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
        return str(made)
    mark = getattr(processor, "image_token", "<image>")
    return f"{mark}\n{prompt}" if has_image else prompt


def check_picture(prompt: str, *files: Path) -> None:
    """Refuse an empty prompt, and pictures that could not be written once they are drawn."""
    if not prompt.strip():
        raise ValueError("the prompt is empty; give --prompt some text")
    for file in files:
        check_folder(file)


def check_folder(file: Path) -> None:
    """Refuse a file in a folder that is not there."""
    if not file.parent.is_dir():
        raise ValueError(f"there is no folder {file.parent}; make it, or choose another file")


def class_number(prompt: str) -> int:
    """The prompt of a model that draws classes."""
    if not prompt.strip().isdigit():
        raise ValueError(f"this model draws classes; give --prompt a number, not {prompt!r}")
    return int(prompt)


def open_image(source: str) -> Any:
    """A picture from a file, or the zoo's own scene."""
    from PIL import Image, UnidentifiedImageError

    from mmspec import zoo

    path = zoo.bundled_scene() if source == SCENE else Path(source)
    if not path.is_file():
        raise ValueError(f"there is no picture {source}; give a file, or {SCENE} for a bundled one")
    try:
        return Image.open(path).convert("RGB")
    except UnidentifiedImageError as error:
        raise ValueError(f"{source} is not a picture that can be read") from error


def quiet() -> None:
    """Keep the libraries' own bars and remarks off the terminal."""
    from transformers.utils import logging

    if os.environ.get("MMSPEC_DEBUG") != "1":
        logging.set_verbosity_error()
    logging.disable_progress_bar()


def set_threads(count: int | None, model: str = "") -> None:
    """Use so many processor threads; by default one for the zoo, and torch's own choice else.

    Zoo models are too small to share out: threads would only wait for each other.
    """
    import torch

    if count is None and model.startswith("zoo:"):
        count = 1
    if count is not None:
        torch.set_num_threads(count)


def present(name: str) -> str:
    """The name of a model, if its folder is there."""
    if name.startswith("zoo:"):
        path = Path(folder(name))
        if not (path / "config.json").exists():
            raise ValueError(
                f"{name} is not there ({path}); train it with `mmspec zoo train {path.name}`"
            )
    elif not Path(name).exists() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ValueError(f"there is no model folder {name}; give a folder, a hub name or zoo:NAME")
    return name
