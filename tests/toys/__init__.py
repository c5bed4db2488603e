"""Tiny, randomly initialised models of real transformers classes, with matching inputs.

No downloads. `model(family)` builds in milliseconds, `inputs(family)` gives what the family's
processor would give, `blind(request)` is the same request with another image.
Three choices make the toys useful as oracles:
- weights are wide (`GAIN`), so greedy text varies and depends on the image;
- the LM head is a Linear with a bias of `NEVER` on the special ids, so neither greedy nor sampled
  decoding emits a placeholder;
- no token ends a sequence: `generate()` always runs the full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from tests.toys.configs import AUDIO, BOS, BUILDERS, IMAGE, MELS, PAD, VIDEO, WINDOW, WORDS
from tests.toys.images import CLIPS, PAINTERS, WHOLE_FRAMES, Film, clip

__all__ = [
    "BOS",
    "CLIPS",
    "FAMILIES",
    "IMAGE",
    "ONE_EACH",
    "PAD",
    "TEXT",
    "VIDEO",
    "VLMS",
    "WHOLE_FRAMES",
    "WINDOW",
    "WORDS",
    "Film",
    "alone",
    "blind",
    "inputs",
    "model",
    "unequal",
    "with_video",
]

GAIN = 1.6
NEVER = -1e4

VLMS: tuple[str, ...] = tuple(PAINTERS)
TEXT: tuple[str, ...] = ("llama", "mistral-sliding", "gemma3-text", "qwen3", "lfm2")
ONE_EACH = ("llama", "gemma3", "lfm2_vl", "llava", "qwen2_5_vl", "idefics3", "whisper")  # a kind of
FAMILIES: tuple[str, ...] = (*TEXT, *VLMS, "whisper")
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def model(family: str, seed: int = 0, layers: int = 2, **changes: Any) -> Any:
    """A float32 `PreTrainedModel` in eval mode; `changes` go to its text configuration.

    Everyone gets a copy: making one takes longer. Typed `Any` because the annotations of
    transformers say that `generate` is no method.
    """
    asked = f"{family} {seed} {layers} {sorted(changes.items())}"
    if asked not in _made:
        _made[asked] = _make(family, seed, layers, changes)
    return _copy(_made[asked], {})


_made: dict[str, Any] = {}


def _make(family: str, seed: int, layers: int, changes: dict[str, Any]) -> Any:
    config, cls = BUILDERS[family](layers, changes)
    with torch.random.fork_rng(devices=[]):  # classes draw a few vectors from the global generator
        torch.manual_seed(seed)
        toy: Any = cls(config)
    toy.float().eval()
    toy.set_attn_implementation("sdpa")
    _randomise(toy, torch.Generator().manual_seed(seed))
    _silence(toy)
    endless: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": None}
    if family == "whisper":
        endless["decoder_start_token_id"] = BOS
    toy.generation_config = GenerationConfig.from_dict(endless)
    return toy


def _copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """What `deepcopy` gives, in a third of its time: most of what a module holds is empty."""
    if id(module) in memo:
        return memo[id(module)]
    own = memo[id(module)] = object.__new__(type(module))
    for name, value in vars(module).items():
        if name == "_modules":
            parts = value.items()
            value = {key: None if part is None else _copy(part, memo) for key, part in parts}
        elif isinstance(value, dict) and not value:
            value = type(value)()
        elif value is not None and not isinstance(value, (str, int)):
            value = deepcopy(value, memo)
        vars(own)[name] = value
    return own


def inputs(family: str, seed: int = 0, batch: int = 1, ragged: bool = False) -> dict[str, Tensor]:
    """A request of `batch` rows.

    Ragged rows differ in text length (left padded) and, where the family allows it, in image size.
    """
    noise = torch.Generator().manual_seed(1000 + seed)
    if family == "whisper":
        return {"input_features": torch.randn(batch, MELS, 2 * AUDIO, generator=noise)}
    rows = [row if ragged else 0 for row in range(batch)]
    blocks: list[list[int]] = [[] for _ in rows]
    tensors: dict[str, Tensor] = {}
    if family in VLMS:
        blocks, tensors = PAINTERS[family](rows, noise)
    # Without an image the text alone must outgrow the sliding window.
    before, after = (4, 7) if family in VLMS else (9, 14)
    ids = []
    for row, block in zip(rows, blocks, strict=True):
        lead, tail = (_text(n, noise) for n in (before + (0, 3, 1)[row % 3], after + 5 * row % 7))
        ids.append([BOS, *lead, *block, *tail])
    width = max(map(len, ids))
    input_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    return {"input_ids": input_ids, "attention_mask": mask, **_types(family, input_ids), **tensors}


def with_video(
    family: str,
    seed: int = 0,
    batch: int = 1,
    tail: int = 5,
    films: Sequence[Film] = (Film(),),
    with_image: bool = False,
) -> dict[str, Tensor]:
    """A request of `batch` rows with a video each, and `tail` words behind it.

    Row b shows `films[b]`, the last of them where there are fewer, padded on the left; behind a
    picture of its own and a word if `with_image`.
    """
    noise = torch.Generator().manual_seed(2000 + seed)
    films_by_row = [films[min(row, len(films) - 1)] for row in range(batch)]
    blocks, tensors = clip(family, films_by_row, noise)
    if with_image:
        seen, more = PAINTERS[family]([0] * batch, noise)
        blocks = [[*own, 7, *block] for own, block in zip(seen, blocks, strict=True)]
        tensors |= more
    rows = [[BOS, *_text(3, noise), *block, *_text(tail, noise)] for block in blocks]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    types = {"mm_token_type_ids": 2 * (ids == VIDEO).long() + (ids == IMAGE).long()}
    return {
        "input_ids": ids,
        "attention_mask": mask,
        **(types if family in MROPE else {}),
        **tensors,
    }


def unequal(family: str, seed: int = 0) -> dict[str, Tensor]:
    """Two pictures in the first row, one in the second, none in the third; text between them."""
    noise = torch.Generator().manual_seed(3000 + seed)
    (one, two, three), tensors = PAINTERS[family]([0, 1, 2], noise)
    if "batch_num_images" in tensors:  # several pictures of a row are not cut into crops
        tensors["batch_num_images"] = torch.tensor([2, 1, 0])
        one = two = [IMAGE] * 5
    if "pixel_attention_mask" in tensors and tensors["pixel_values"].dim() == 5:
        tensors |= {name: _by_rows(tensors[name]) for name in _LAID_OUT}
    rows = [[*one, *_text(2, noise), *two], three, []]
    ids = [[BOS, *_text(3, noise), *row, *_text(4, noise)] for row in rows]
    width = max(map(len, ids))
    input_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    return {"input_ids": input_ids, "attention_mask": mask, **_types(family, input_ids), **tensors}


_LAID_OUT = ("pixel_values", "pixel_attention_mask")


def _by_rows(tiles: Tensor) -> Tensor:  # (3, n, ...) -> (3, 2 n, ...)
    """Tiles of two pictures in the first row, of one in the second; what lacks is zero."""
    made = tiles.new_zeros(3, 2 * tiles.shape[1], *tiles.shape[2:])
    made[0] = tiles[:2].flatten(0, 1)
    made[1, : tiles.shape[1]] = tiles[2]
    return made


def blind(request: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The same request with another random image (or sound)."""
    noise = torch.Generator().manual_seed(777_000 + seed)
    other = dict(request)
    for key in ("pixel_values", "input_features"):
        if key in request:
            other[key] = torch.randn(request[key].shape, generator=noise)
    return other


def alone(request: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row of a batch as its own request, without padding."""
    if "input_features" in request:
        return {"input_features": request["input_features"][row : row + 1]}
    keep = request["attention_mask"][row].bool()
    batch = len(request["input_ids"])
    single = {key: value.chunk(batch)[row] for key, value in request.items()}
    if "image_grid_thw" in request:  # flat patches: each row owns t * h * w of them
        counts = request["image_grid_thw"].prod(-1).tolist()
        single["pixel_values"] = torch.split(request["pixel_values"], counts)[row]
    for key in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        if key in request:
            single[key] = single[key][:, keep]
    return single


def _text(count: int, noise: torch.Generator) -> list[int]:
    ids: list[int] = torch.randint(WORDS.start, WORDS.stop, (count,), generator=noise).tolist()
    return ids


def _types(family: str, input_ids: Tensor) -> dict[str, Tensor]:
    image = (input_ids == IMAGE).long()
    if family in MROPE:
        return {"mm_token_type_ids": image}
    if family == "gemma3":
        return {"token_type_ids": image}
    if family == "paligemma":  # 0 is the bidirectional prefix: image and prompt
        return {"token_type_ids": torch.zeros_like(image)}
    return {}


@torch.no_grad()
def _randomise(toy: Any, noise: torch.Generator) -> None:
    """Unit-variance embeddings, matrices of std GAIN / sqrt(fan in); vectors stay as built."""
    words = toy.get_input_embeddings()
    scale = float(getattr(words, "embed_scale", 1.0))  # Gemma multiplies inside the module
    for module in toy.modules():
        for name, weight in module.named_parameters(recurse=False):
            if name == "A_log":  # as built, a linear-attention state forgets within a token
                weight.fill_(-3.0)
            if weight.dim() < 2:
                continue
            std = GAIN / weight[0].numel() ** 0.5
            if isinstance(module, nn.Embedding):
                std = 1.0 / scale if module is words else 0.5
            weight.normal_(0.0, std, generator=noise)


@torch.no_grad()
def _silence(toy: Any) -> None:
    """Give the LM head a bias that rules the special ids out."""
    head = toy.get_output_embeddings()
    bias = head.weight.new_full(head.weight.shape[:1], NEVER)
    bias[WORDS.start : WORDS.stop] = 0.0
    head.bias = nn.Parameter(bias)
