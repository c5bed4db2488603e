"""Drawing pictures: a request for `generate_images` becomes a request of the loop, and comes back.

What differs between image models is data (`ImageFamily`, made on the modalities shelf). The loop
knows nothing of pictures: guidance is part of the backbone, structure is part of the distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec._hf import inferred_mask
from mmspec.codes.grid import Grid
from mmspec.codes.grid_mask import GridMask
from mmspec.codes.image_family import ImageFamily, partial_pictures, pictures
from mmspec.distributions.noise import fresh_seed
from mmspec.distributions.sampling import Sampling
from mmspec.errors import about, check_number, described, is_whole, unknown_message
from mmspec.stats import Stats
from mmspec.targets.readers.code_backbone import FOREIGN
from mmspec.targets.readers.guidance import NEGATIVE, SCALE
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.generation_settings import SAMPLED, resolve, sampled
from mmspec.targets.tokens.inputs import check_inputs

DRAWN = ("do_sample", *SAMPLED)
OWN = ("prompt", "grid", "guidance", "negative", "num_return_sequences", "seed", "row_ids", *DRAWN)
MASK = "negative_prompt_attention_mask"
SIZES = "image_sizes"  # of Emu3's processor, which says the same of every prompt
THEIRS = {"guidance_scale": "guidance", "negative_prompt_ids": "negative", SIZES: "grid"}


@dataclass(frozen=True)
class Images:
    """What `generate_images` returns."""

    images: list[Image.Image]
    ids: Tensor  # (B, H, W) int64: the token in each cell
    sequences: Tensor  # (B, L) int64: all new tokens, structure included
    rounds: Tensor  # (B, H, W) int64: the round that each cell was accepted in, 0 = the prompt's
    stats: Stats


@dataclass(frozen=True, eq=False)
class Drawing:
    """One `generate_images` call in terms of the loop."""

    image_family: ImageFamily
    grid: Grid
    inputs: dict[str, Any]
    sampling: Sampling
    stop: Stop
    seed: int
    row_ids: Sequence[int] | None

    def finish(
        self, tokens: Sequence[Sequence[int]], rounds: Sequence[Sequence[int]], stats: Stats
    ) -> Images:
        """Cut the cells out of the new tokens and decode them."""
        codes = self.image_family.codebook.codes
        sequences, turns = (torch.tensor(rows, device=codes.device) for rows in (tokens, rounds))
        ids = self.placed(sequences)
        drawn = pictures(self.image_family.decode(codes[ids]))
        return Images(drawn, ids, sequences, self.placed(turns), stats)

    def partial(self, tokens: Sequence[Sequence[int]]) -> list[Image.Image]:
        """The pictures of so many tokens; where none is yet, the last code goes on, unseen."""
        book, cell = self.image_family.codebook, cells(self.grid, torch.device("cpu"))
        known = torch.stack([cell < len(row) for row in tokens])
        ids = [self._continued(row) for row in tokens]
        pixels = self.image_family.decode(book.codes[torch.stack(ids).to(book.codes.device)])
        return partial_pictures(pixels, known.to(pixels.device))

    def _continued(self, tokens: Sequence[int]) -> Tensor:  # (H, W)
        cell = cells(self.grid, torch.device("cpu"))
        there = cell[cell < len(tokens)]
        row = torch.tensor([*tokens, *[0] * (self.grid.length - len(tokens))])
        last = row[there[-1]] if len(there) else self.image_family.codebook.ids[0].cpu()
        return torch.where(cell < len(tokens), row[cell], last)

    def placed(self, sequences: Tensor) -> Tensor:  # (B, L) -> (B, H, W)
        """What of a picture's tokens stands in cells."""
        return sequences[:, cells(self.grid, sequences.device)]


def prepare(
    image_family: ImageFamily,
    model: Any,
    vocabulary: int,
    most: int | None,
    arguments: Mapping[str, Any],
    processor: Any = None,
) -> Drawing:
    """Check the arguments of `generate_images`.

    What is not said, the generation configuration of `model` says. `vocabulary` is the size of the
    target's, `most` its longest sequence; `processor` turns prompts into tensors. Raises ValueError
    for unknown names, a grid that the model cannot draw, guidance without an unconditional prompt,
    words for a model that reads none.
    """
    unknown = sorted(set(arguments) - {*OWN, *THEIRS, MASK, *image_family.inputs})
    if unknown:
        known = [*image_family.inputs, *OWN, *THEIRS, MASK]
        raise ValueError(unknown_message(unknown, known, "generate_images()"))
    arguments = _translated(arguments)
    grid = _grid(image_family, arguments.get("grid"), vocabulary)
    arguments = _read(image_family, processor, grid, arguments)
    asked = image_family.request({n: arguments[n] for n in image_family.inputs if n in arguments})
    inputs = _repeated(asked, _times(arguments.get("num_return_sequences")))
    length = inputs["attention_mask"].shape[1]
    if most is not None and length + grid.length > most:
        raise ValueError(
            f"a prompt of {length} tokens and a picture of {grid.length} do not fit into the "
            f"{most} positions of {image_family.name}; give a smaller grid="
        )
    start = inputs["attention_mask"].sum(-1, keepdim=True)
    seed = arguments.get("seed")
    return Drawing(
        image_family,
        grid,
        _guided(image_family, model, inputs, arguments),
        replace(_sampling(model, grid, inputs, arguments), places=(GridMask(grid, start),)),
        Stop(grid.length),
        fresh_seed() if seed is None else int(seed),
        arguments.get("row_ids"),
    )


def cells(grid: Grid, device: torch.device) -> Tensor:  # (H, W)
    """Offsets of a grid's cells."""
    rows = torch.arange(grid.height, device=device)[:, None] * grid.period
    return len(grid.header) + rows + torch.arange(grid.width, device=device)


def spoken(processor: Any, texts: Sequence[str], **how: Any) -> Mapping[str, Any]:
    """A processor's ids of prompts (B, L), padded on the left, and their mask."""
    shape = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    made = processor(text=list(texts), **how, **shape)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def only_layout(name: str, size: tuple[int, int], codes: int) -> Callable[[int, int], Grid]:
    """The `layout` of a model that draws pictures of one size, of all its codes."""

    def layout(height: int, width: int) -> Grid:
        if (height, width) != size:
            raise ValueError(
                f"a grid of {height} x {width} does not fit: {name} draws {size[0]} x {size[1]} "
                "codes only; leave the size to it"
            )
        return Grid(height, width, (0, codes))

    return layout


def token_request(model: Any, vocabulary: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The `request` of models whose prompt is plain token ids, of a vocabulary of that size.

    Without a mask padding is told as the model's `generate()` tells it.
    """
    check_inputs(inputs, vocabulary)
    ids = inputs.get("input_ids")
    if ids is None or not ids.numel():
        raise ValueError(
            "the request has no prompt; pass the processor's output: generate_images(**inputs)"
        )
    mark = getattr(model.config, "image_token_id", None)
    if mark is not None and bool((ids == mark).any()):
        raise ValueError(
            f"the prompt has image tokens ({mark}), but {type(model).__name__} draws behind words "
            "alone; remove the image token from the text"
        )
    mask = inputs.get("attention_mask")
    mask = inferred_mask(model, ids) if mask is None else mask
    mask = torch.ones_like(ids) if mask is None else mask
    if bool((mask[:, -1] == 0).any()):
        raise ValueError("the prompts are padded on the right; pad on the left")
    return {"input_ids": ids, "attention_mask": mask.long()}


def _translated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by our names, where transformers' `generate()` and processors have others."""
    said = {n: value for n, value in arguments.items() if n not in THEIRS and n != MASK}
    mask = arguments.get(MASK)
    if mask is not None and arguments.get("negative_prompt_ids") is None:
        raise ValueError(f"{MASK}= belongs to negative_prompt_ids=, which is missing; give both")
    for theirs, ours in THEIRS.items():
        value = arguments.get(theirs)
        if value is None:
            continue
        if said.get(ours) is not None:
            raise ValueError(f"{theirs}= and {ours}= say the same thing; give one of them")
        if ours == "grid":
            value = _same_size(value)
        elif ours == "negative":
            value = {"input_ids": value, "attention_mask": mask}
        said[ours] = value
    return said


def _same_size(sizes: Any) -> tuple[int, int]:
    """The rows and columns that a processor names for every prompt."""
    found = {tuple(size) for size in torch.as_tensor(sizes).tolist()}
    if len(found) > 1:
        raise ValueError(
            f"image_sizes={sorted(found)} differ, but pictures of one call have one size; draw "
            "them in calls of their own"
        )
    height, width = found.pop()
    return int(height), int(width)


def _read(
    image_family: ImageFamily, processor: Any, grid: Grid, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments with tensors in place of prompts in words."""
    prompt, negative = arguments.get("prompt"), arguments.get("negative")
    rest = {name: value for name, value in arguments.items() if name != "prompt"}
    texts = [prompt] if isinstance(prompt, str) else prompt
    if texts is not None:
        clash = [name for name in image_family.inputs if name in arguments]
        if clash:
            raise ValueError(f"prompt= and {', '.join(clash)}= both say what to draw; give one")
        rest |= worded(image_family, processor, texts, grid)
    if negative is not None and not (isinstance(negative, Mapping) and negative):
        if not isinstance(negative, str | list | tuple):
            raise ValueError(
                f"negative={described(negative)} is no prompt; give a text, a list of texts, or "
                "the processor's output for one"
            )
        others = [negative] if isinstance(negative, str) else negative
        with about("negative"):
            rest["negative"] = worded(image_family, processor, others, grid)
    return rest


def worded(
    image_family: ImageFamily, processor: Any, texts: Sequence[str], grid: Grid
) -> Mapping[str, Any]:
    """Prompts in words as a request's tensors. Raises ValueError for a model that reads none."""
    if image_family.words is None:
        raise ValueError(
            f"{image_family.name} reads no words; give what it draws behind: "
            f"generate_images({'=..., '.join(image_family.inputs)}=...)"
        )
    if processor is None:
        raise ValueError(
            "a prompt in words needs the model's processor; give it once, as accelerate(model, "
            f"processor=...), or pass its tensors ({', '.join(image_family.inputs)})"
        )
    listed = isinstance(texts, list | tuple) and len(texts) > 0
    if not listed or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"prompt={texts!r} is neither a text nor a list of texts; give one")
    made, device = image_family.words(processor, texts, grid), image_family.codebook.vectors.device
    return {name: value.to(device) for name, value in made.items()}


def _grid(family: ImageFamily, given: Any, vocabulary: int) -> Grid:
    if isinstance(given, Grid):
        ids = given.ids()
        named = (
            *given.header,
            *given.footer,
            *(() if given.separator is None else (given.separator,)),
        )
        if max(int(ids.max()), *named, 0) >= vocabulary or not bool(
            torch.isin(ids, family.codebook.ids.cpu()).all()
        ):
            raise ValueError(
                f"the grid has tokens that {family.name} does not speak; make it with rows and "
                "columns only: grid=(height, width)"
            )
        return given
    return laid_out(family, given)


def laid_out(family: ImageFamily, given: Any) -> Grid:
    """A picture of so many rows and columns; of the usual size where nothing is given."""
    size = family.size if given is None else given
    if size is None:
        raise ValueError(f"{family.name} draws any size; give grid=(height, width) in codes")
    is_pair = isinstance(size, tuple | list) and len(size) == 2
    if not is_pair or not all(is_whole(one) and one > 0 for one in size):
        raise ValueError(
            f"grid={given!r} is no size; give (height, width) in codes, each at least 1, or a Grid"
        )
    return family.layout(int(size[0]), int(size[1]))


def _guided(
    family: ImageFamily, model: Any, inputs: dict[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs, with scale and unconditional prompt where there is guidance."""
    own = model.generation_config.guidance_scale if model.can_generate() else None
    said = (arguments.get("guidance"), own, family.guidance)
    scale = next(value for value in said if value is not None)
    check_number("guidance", scale, 0, example=5)
    negative = arguments.get("negative")
    if negative is not None:
        with about("negative"):
            unknown = sorted({*negative} - {*family.inputs, SIZES})
            if unknown:
                raise ValueError(unknown_message(unknown, family.inputs, "an unconditional prompt"))
            negative = _shared(family.request(negative), inputs, arguments)
    if scale == 1:
        return inputs
    if negative is None and family.unconditional is not None:
        negative = family.unconditional(inputs)
    if negative is None:
        raise ValueError(
            f"guidance={scale} needs an unconditional prompt, and {family.name} has none of its "
            "own; give negative= the processor's output for one, or guidance=1"
        )
    return {**inputs, SCALE: scale, NEGATIVE: negative}


def _shared(
    negative: dict[str, Any], inputs: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """An unconditional prompt for every picture: one for all, or one per prompt."""
    pictures = len(inputs["attention_mask"])
    prompts = pictures // _times(arguments.get("num_return_sequences"))
    given = len(negative["attention_mask"])
    if given not in (1, prompts):
        raise ValueError(
            f"{prompts} prompts have {given} unconditional ones; give one for all, or one for each"
        )
    return _repeated(negative, pictures // given)


def _repeated(request: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Every row of a request so many times, one behind the other."""
    return {name: value.repeat_interleave(times, 0) for name, value in request.items()}


def _times(given: Any) -> int:
    """How many pictures are drawn of a prompt."""
    times = 1 if given is None else given
    if not is_whole(times) or times < 1:
        raise ValueError(f"num_return_sequences={given!r} is no number of pictures; give 1 or more")
    return int(times)


def _sampling(
    model: Any, grid: Grid, inputs: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Sampling:
    """How the model's own `generate()` draws: as is said, else by its generation configuration.

    What neither says are transformers' defaults (of a model without `generate()`, such as LlamaGen:
    the whole distribution).
    """
    said = sampled({name: arguments[name] for name in DRAWN if arguments.get(name) is not None})
    if not model.can_generate():
        return Sampling(**said)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    # guidance is part of the backbone, and how many pictures there are stands in the inputs
    settings = {**said, "guidance_scale": 1.0, "num_return_sequences": 1}
    settings["max_new_tokens"] = grid.length
    sampling, _ = resolve(
        model, settings, ids.shape[1], ids.device, batch=len(ids), inputs=ids, attention_mask=mask
    )
    if sampling.needs_prefix and bool((ids == FOREIGN).any()):
        names = ", ".join(sorted(type(one).__name__ for one in sampling.processors))
        raise ValueError(
            f"{names} looks at tokens before, but the prompt of {type(model).__name__} is not of "
            "the vocabulary of its codes; take the setting out of the model's generation_config"
        )
    return sampling
