"""Folders of small random models, as a user would have them: sound ones, and damaged ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import toys

WORDS = [f"w{number}" for number in range(200)]


def save_text(model: Any, folder: Path, words: list[str]) -> None:
    """A text model with a tokenizer of those words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    table = {word: number for number, word in enumerate(["<pad>", "<bos>", *words[2:]])}
    core = Tokenizer(models.WordLevel(table, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    build: Any = PreTrainedTokenizerFast
    build(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>").save_pretrained(folder)
    model.get_output_embeddings().bias = None
    model.save_pretrained(folder)


def text_pair(root: Path) -> None:
    """`text`, `text-drafter`, and `other` of another vocabulary."""
    size = int(toys.model("llama", layers=3).config.vocab_size)
    torch.manual_seed(0)
    for name, seed in (("text", 0), ("text-drafter", 1)):
        save_text(toys.model("llama", seed=seed, layers=3), root / name, WORDS[:size])
    save_text(
        toys.model("llama", layers=3, vocab_size=2000),
        root / "other",
        [f"x{i}" for i in range(2000)],
    )


def drop(file: Path) -> None:
    """Leave a tensor out."""
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[3])
    save_file(tensors, file, {"format": "pt"})


def crop_tensor(file: Path) -> None:
    """One tensor lies on its side."""
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if tensors[name].dim() == 2)
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, file, {"format": "pt"})


def _rewritten(**changes: Any) -> Callable[[Path], None]:
    """A configuration that says something else; None = the key is gone."""

    def rewrite(file: Path) -> None:
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return rewrite


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {  # of a model's folder: file, what happens
    "weights-empty": ("model.safetensors", lambda file: file.write_bytes(b"")),
    "weights-cut": (
        "model.safetensors",
        lambda file: file.write_bytes(file.read_bytes()[: -file.stat().st_size // 3]),
    ),
    "weights-noise": ("model.safetensors", lambda file: file.write_bytes(b"\xff" * 999)),
    "weights-gone": ("model.safetensors", lambda file: file.unlink()),
    "weights-one-less": ("model.safetensors", drop),
    "weights-turned": ("model.safetensors", crop_tensor),
    "weights-pickled": (
        "model.safetensors",
        lambda file: file.rename(file.with_name("pytorch_model.bin")),
    ),
    "config-empty": ("config.json", lambda file: file.write_text("")),
    "config-cut": ("config.json", lambda file: file.write_text(file.read_text()[:40])),
    "config-list": ("config.json", lambda file: file.write_text("[1, 2]")),
    "config-binary": ("config.json", lambda file: file.write_bytes(b"\x00\xff\xfe" * 9)),
    "config-gone": ("config.json", lambda file: file.unlink()),
    "config-no-type": ("config.json", _rewritten(model_type=None)),
    "config-odd-type": ("config.json", _rewritten(model_type="no_such_model", architectures=None)),
    "config-other-width": ("config.json", _rewritten(hidden_size=24)),
    "config-odd-value": ("config.json", _rewritten(num_hidden_layers="many")),
    "tokenizer-cut": ("tokenizer.json", lambda file: file.write_text(file.read_text()[:50])),
    "tokenizer-gone": ("tokenizer.json", lambda file: file.unlink()),
}
SPOIL_THE_MODEL = tuple(name for name in DAMAGES if not name.startswith("tokenizer"))


def copy_damaged(sound: Path, root: Path) -> None:
    """A copy of a text model's folder for every damage."""
    for name, (file, harm) in DAMAGES.items():
        shutil.copytree(sound, root / name)
        harm(root / name / file)
