"""What is in the zoo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Entry:
    """A target, or a drafter trained to follow one. `drafter` names the default of a target."""

    name: str
    kind: Literal["target", "drafter"]
    modality: str
    target: str | None
    sees: Literal["nothing", "pixels", "target-states"]
    drafter: str | None
    description: str


ENTRIES = (
    Entry(
        "llava",
        "target",
        "vlm",
        None,
        "pixels",
        "llava-drafter",
        "LLaVA: CLIP vision tower of 3 layers, Llama text model of 24 layers.",
    ),
    Entry(
        "llava-drafter",
        "drafter",
        "vlm",
        "llava",
        "pixels",
        None,
        "LLaVA with one vision layer and one text layer; looks at the picture itself.",
    ),
    Entry(
        "llava-text-drafter",
        "drafter",
        "vlm",
        "llava",
        "nothing",
        None,
        "Llama of one layer with the tokenizer of its target; never sees the picture.",
    ),
    Entry(
        "qwen2.5-vl",
        "target",
        "vlm",
        None,
        "pixels",
        "qwen2.5-vl-drafter",
        "Qwen2.5-VL: vision tower of 3 layers, text model of 24 layers, multimodal positions.",
    ),
    Entry(
        "qwen2.5-vl-drafter",
        "drafter",
        "vlm",
        "qwen2.5-vl",
        "pixels",
        None,
        "Qwen2.5-VL with one vision layer and one text layer; looks at the picture itself.",
    ),
    Entry(
        "qwen2.5-vl-text-drafter",
        "drafter",
        "vlm",
        "qwen2.5-vl",
        "nothing",
        None,
        "Qwen2 of one layer with the tokenizer of its target; never sees the picture.",
    ),
    Entry(
        "diffusion",
        "target",
        "diffusion",
        None,
        "nothing",
        "diffusion-drafter",
        "PixArt: diffusion transformer of 10 layers, T5 encoder, 48 x 48 pictures from a prompt.",
    ),
    Entry(
        "diffusion-drafter",
        "drafter",
        "diffusion",
        "diffusion",
        "nothing",
        None,
        "PixArt transformer of 2 layers; reads the states of its target's encoder.",
    ),
    Entry(
        "image",
        "target",
        "image",
        None,
        "nothing",
        "image-drafter",
        "Janus: Llama of 16 layers, VQ codes of 72 x 72 pictures; draws them from a prompt.",
    ),
    Entry(
        "image-drafter",
        "drafter",
        "image",
        "image",
        "nothing",
        None,
        "Janus with a Llama of one layer; the words, codes and pictures of its target.",
    ),
    Entry(
        "image-head",
        "drafter",
        "image",
        "image",
        "target-states",
        None,
        "One layer that continues the states of its target, and draws with its head.",
    ),
    Entry(
        "image-sketch",
        "drafter",
        "image",
        "image",
        "nothing",
        None,
        "Janus with a Llama of 3 layers; small pictures of 3 x 3 codes, and how to enlarge them.",
    ),
    Entry(
        "mar",
        "target",
        "image",
        None,
        "nothing",
        "mar-drafter",
        "MAR: 8 layers and a diffusion head of 8 blocks; draws continuous tokens of a class.",
    ),
    Entry(
        "mar-drafter",
        "drafter",
        "image",
        "mar",
        "nothing",
        None,
        "MAR of 2 layers and a head of 2 blocks; the tokens and classes of its target.",
    ),
)
ALIASES = {"vlm": "llava"}
FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The names of all checkpoints."""
    return tuple(entry.name for entry in ENTRIES)


def info(name: str) -> Entry:
    """What is known of a checkpoint; `name` may be an alias, such as "vlm"."""
    name = ALIASES.get(name, name)
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    known = ", ".join([*names(), *ALIASES])
    raise ValueError(f"{name!r} is not in the zoo; choose one of: {known}")


def path(name: str) -> Path:
    """The folder of a checkpoint, an ordinary Hugging Face or diffusers one."""
    return FOLDER / "checkpoints" / info(name).name


def is_present(name: str) -> bool:
    """Whether a checkpoint has been trained: a model or a pipeline lies in its folder."""
    return any((path(name) / file).exists() for file in ("config.json", "model_index.json"))


def bundled_scene() -> Path:
    """A picture to try things on: a PNG of 256 x 256 pixels."""
    return FOLDER / "scene.png"
