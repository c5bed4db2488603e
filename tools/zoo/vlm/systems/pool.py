"""A pool on disk of the target's answers to requests, turn by turn: what draft models learn from.

    folder/answers-00000.safetensors    pictures of some requests, and in its header the ids of
    folder/answers-00001.safetensors    every turn: prompt, the target's answer, reference answer
                                        (with grids, where pictures are rows of patches)

A prompt of a later turn holds the target's own earlier answers. A pool that was interrupted is
continued; one of another target has another folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from mmspec.training import checkpoints
from mmspec.training.fitting import TrainingProgress, iterate_chunks, silent
from mmspec.zoo.catalogue import path, processor
from mmspec.zoo.language import ExampleKind, examples
from mmspec.zoo.scene import Split
from mmspec.zoo.training import load_teacher

REQUESTS = {  # modules with requests of a target
    name: "mmspec.zoo.requests" for name in ("llava-chat", "qwen2.5-vl-chat")
}
_STORED = {"pictures": "pixel_values", "grids": "image_grid_thw"}
_BATCH = 96
_SAMPLED_ONE_IN = 4  # the others are greedy
_SLACK, _EXTRA = 1.5, 16  # of the length of reference answers


class Turn(Protocol):
    """A prompt, and a reference answer."""

    prompt: str
    answer: str


class Request(Protocol):
    """A picture, and one or more turns about it."""

    image: Image.Image
    category: str
    turns: Sequence[Any]  # of `Turn`


@dataclass(frozen=True)
class SceneTurn:
    prompt: str
    answer: str


@dataclass(frozen=True)
class SceneRequest:
    """A question or caption of the Scene world, for targets without requests of their own."""

    image: Image.Image
    category: str
    turns: tuple[SceneTurn, ...]


@dataclass(frozen=True)
class TargetAnswer:
    """The target's answer (T,) to a prompt (L,) of one turn; `picture` numbers the picture."""

    category: str
    turn: int
    picture: int
    prompt: Tensor
    tokens: Tensor
    reference: Tensor  # reference answer, with the end token

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass(frozen=True)
class AnswerPool:
    """Answers of a target, and the pictures that they are about.

    `pictures` are (1, C, H, W) or, with `grids` (1, 3) of each, patches (n, D) as of Qwen-VL.
    """

    folder: Path
    image_token: int  # placeholder of a picture's features
    answers: list[TargetAnswer]
    pictures: list[Tensor]
    grids: list[Tensor]

    def media(self, answers: Sequence[TargetAnswer], ids: Tensor) -> dict[str, Tensor]:
        """Inputs of the target: the pictures of answers, whose padded prompts are `ids` (B, L)."""
        rows = [one.picture for one in answers]
        found = {"pixel_values": torch.cat([self.pictures[row] for row in rows])}
        if not self.grids:
            return found
        types = (ids == self.image_token).int()
        grids = torch.cat([self.grids[row] for row in rows])
        return {**found, "image_grid_thw": grids, "mm_token_type_ids": types}


def make_requests(target: str, count: int, split: Split, seed: int) -> list[Any]:
    """Return `count` requests of a split in each category of a target."""
    if target in REQUESTS:
        source: Any = import_module(REQUESTS[target])
        return [
            one
            for category in source.CATEGORIES
            for one in source.requests(count, split, seed, category)
        ]
    kinds: tuple[ExampleKind, ...] = ("caption", "question")
    return [
        SceneRequest(one.image, one.kind, (SceneTurn(one.prompt, one.answer),))
        for kind in kinds
        for one in examples(count, split, seed, kind)
    ]


def default_folder() -> Path:
    """The folder of pools in the user's cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return root / "mmspec" / "answers"


def _weights_digest(target: str) -> str:
    weights = (path(target) / "model.safetensors").read_bytes()
    return hashlib.sha256(weights).hexdigest()[:12]


def load_pool(
    target: str,
    count: int,
    folder: Path,
    split: Split = "train",
    seed: int = 0,
    progress: TrainingProgress = silent,
) -> AnswerPool:
    """Return the answers to `count` requests per category.

    They are in a folder of their own in `folder`, named after the target and its weights; missing
    ones are generated into it. Raises ValueError for damaged files.
    """
    folder = folder / f"{target}-{_weights_digest(target)}" / f"{split}-{count}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    chunks = list(iterate_chunks(_order(make_requests(target, count, split, seed)), _BATCH))
    reader: Any = processor(target)
    pool, model = AnswerPool(folder, reader.image_token_id, [], [], []), None
    for number, chunk in enumerate(chunks):
        file = folder / f"answers-{number:05d}.safetensors"
        if not file.exists():
            model = load_teacher(target) if model is None else model
            is_sampled = split == "train" and number % _SAMPLED_ONE_IN == _SAMPLED_ONE_IN - 1
            tensors, rows = answer_requests(model, reader, chunk, is_sampled, number)
            checkpoints.write(file, tensors, {"rows": rows})
            progress("answers", number + 1, len(chunks), float("nan"))
        _append(pool, file)
    return pool


def _order(found: Sequence[Any]) -> list[Any]:
    """Requests sorted so that those of a batch have as many turns, of similar length."""
    return sorted(found, key=lambda one: (len(one.turns), len(one.turns[0].answer)))


@torch.no_grad()
def answer_requests(
    model: Any, reader: Any, requests: Sequence[Any], is_sampled: bool, seed: int
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Generate the answers to requests, turn by turn, with the processor `reader`."""
    rows: list[dict[str, Any]] = []
    chats: list[list[dict[str, Any]]] = [[] for _ in requests]
    tokenizer, tensors = reader.tokenizer, dict[str, Tensor]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for turn in range(max(len(one.turns) for one in requests)):
            own = [at for at, one in enumerate(requests) if turn < len(one.turns)]
            for at in own:
                chats[at].append(_user(requests[at].turns[turn].prompt, is_first=turn == 0))
            inputs = encode_chats(reader, [chats[at] for at in own], [requests[at] for at in own])
            if turn == 0:
                tensors = {ours: inputs[name] for ours, name in _STORED.items() if name in inputs}
            references = [tokenizer(requests[at].turns[turn].answer).input_ids for at in own]
            limit = int(_SLACK * max(map(len, references))) + _EXTRA
            out = model.generate(**inputs, do_sample=is_sampled, max_new_tokens=limit)
            for index, at in enumerate(own):
                new = cut_at_end(out[index, inputs["input_ids"].shape[1] :], tokenizer.eos_token_id)
                prompt = inputs["input_ids"][index][inputs["attention_mask"][index].bool()]
                reference = [*references[index], tokenizer.eos_token_id]
                text = tokenizer.decode(new, skip_special_tokens=True)
                chats[at].append({"role": "assistant", "content": text})
                rows.append(
                    {
                        **{"request": at, "turn": turn, "category": requests[at].category},
                        **{"prompt": prompt.tolist(), "tokens": new, "reference": reference},
                    }
                )
    return tensors, rows


def encode_chats(
    reader: Any, chats: Sequence[list[dict[str, Any]]], requests: Sequence[Any]
) -> dict[str, Tensor]:
    """Inputs of `generate` of chats about one picture each, padded on the left.

    Raises ValueError where pictures cannot be split by chat: without grids, one (C, H, W) for each.
    """
    texts = [
        reader.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in chats
    ]
    made = reader(
        text=texts, images=[one.image for one in requests], padding=True, return_tensors="pt"
    )
    parts = made.get("image_grid_thw", made["pixel_values"])
    if len(parts) != len(chats) or (parts is made["pixel_values"] and parts.dim() != 4):
        raise ValueError(
            f"pixel_values have shape {tuple(made['pixel_values'].shape)}, but one (C, H, W) for "
            "each request, or image_grid_thw, is needed; give a target of the LLaVA or Qwen-VL "
            "family"
        )
    return dict(made)


def cut_at_end(tokens: Tensor, end: int) -> list[int]:
    """The tokens (T,) of an answer up to its end token, which is kept."""
    found: list[int] = tokens.tolist()
    return found[: found.index(end) + 1] if end in found else found


def iterate_prompts(pool: AnswerPool) -> Iterator[tuple[str, list[TargetAnswer]]]:
    """Iterate over the categories of a pool, each with its answers."""
    for category in sorted({one.category for one in pool.answers}):
        yield category, [one for one in pool.answers if one.category == category]


def _user(prompt: str, is_first: bool) -> dict[str, Any]:
    picture = [{"type": "image"}] if is_first else []
    return {"role": "user", "content": [*picture, {"type": "text", "text": prompt}]}


def _append(pool: AnswerPool, file: Path) -> None:
    tensors, content = checkpoints.read(file)
    first, grids = len(pool.pictures), tensors.get("grids")
    sizes: Any = 1 if grids is None else grids.prod(-1).tolist()
    pool.pictures.extend(tensors["pictures"].split(sizes))
    pool.grids.extend(() if grids is None else grids.split(1))
    for row in content["rows"]:
        prompt, tokens, reference = (
            torch.tensor(row[name], dtype=torch.int64) for name in ("prompt", "tokens", "reference")
        )
        at = (row["category"], row["turn"], first + row["request"])
        pool.answers.append(TargetAnswer(*at, prompt, tokens, reference))
