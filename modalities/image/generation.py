"""Convert `generate_images` arguments to a request of the decoding loop, and its tokens to images.

Image models differ in data only (`ImageFamily`). The loop is independent of images: guidance is
part of the backbone, and the grid structure is part of the distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec._hf import infer_mask
from mmspec.codes.grid import Grid, GridMask
from mmspec.codes.image_family import ImageFamily, render_partial, to_images
from mmspec.distributions.noise import fresh_seed
from mmspec.distributions.sampling import Sampling
from mmspec.errors import check_number, format_value, is_integer, prefix_errors, unknown_message
from mmspec.stats import Stats
from mmspec.targets.readers.code_backbone import FOREIGN
from mmspec.targets.readers.guidance import NEGATIVE, SCALE
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.context import check_inputs
from mmspec.targets.tokens.generation_settings import SAMPLING_SETTINGS, infer_do_sample, resolve

SAMPLING_ARGUMENTS = ("do_sample", *SAMPLING_SETTINGS)
ARGUMENTS = (
    "prompt",
    "grid",
    "guidance",
    "negative",
    "num_return_sequences",
    "seed",
    "row_ids",
    "on_round",
    *SAMPLING_ARGUMENTS,
)
NEGATIVE_MASK = "negative_prompt_attention_mask"
IMAGE_SIZES = "image_sizes"  # output of Emu3's processor, the same size for every prompt
ALIASES = {"guidance_scale": "guidance", "negative_prompt_ids": "negative", IMAGE_SIZES: "grid"}


@dataclass(frozen=True)
class Images:
    """What `generate_images` returns."""

    images: list[Image.Image]
    ids: Tensor  # (B, H, W) int64: the token in each cell
    sequences: Tensor  # (B, L) int64: all new tokens, structure included
    rounds: Tensor  # (B, H, W) int64: the round that accepted each cell, 0 = the prefill
    stats: Stats


@dataclass(frozen=True, eq=False)
class ImageRequest:
    """The checked arguments of one `generate_images` call."""

    image_family: ImageFamily
    grid: Grid
    inputs: dict[str, Any]
    sampling: Sampling
    stop: Stop
    seed: int
    row_ids: Sequence[int] | None

    def build_output(
        self, tokens: Sequence[Sequence[int]], rounds: Sequence[Sequence[int]], stats: Stats
    ) -> Images:
        """Select the cells from the new tokens and decode them."""
        codes = self.image_family.codebook.codes
        sequences, turns = (torch.tensor(rows, device=codes.device) for rows in (tokens, rounds))
        ids = self.gather_cells(sequences)
        drawn = to_images(self.image_family.decode(codes[ids]))
        return Images(drawn, ids, sequences, self.gather_cells(turns), stats)

    def decode_partial(self, tokens: Sequence[Sequence[int]]) -> list[Image.Image]:
        """Partial images of the tokens so far.

        The decoder gets the latest code for open cells, which are masked in the result.
        """
        book, cell = self.image_family.codebook, cell_offsets(self.grid, torch.device("cpu"))
        known = torch.stack([cell < len(row) for row in tokens])
        ids = [self._fill_cells(row) for row in tokens]
        pixels = self.image_family.decode(book.codes[torch.stack(ids).to(book.codes.device)])
        return render_partial(pixels, known.to(pixels.device))

    def _fill_cells(self, tokens: Sequence[int]) -> Tensor:  # (H, W)
        cell = cell_offsets(self.grid, torch.device("cpu"))
        filled = cell[cell < len(tokens)]
        row = torch.tensor([*tokens, *[0] * (self.grid.length - len(tokens))])
        last = row[filled[-1]] if len(filled) else self.image_family.codebook.ids[0].cpu()
        return torch.where(cell < len(tokens), row[cell], last)

    def gather_cells(self, sequences: Tensor) -> Tensor:  # (B, L) -> (B, H, W)
        """The tokens in the cells of the grid."""
        return sequences[:, cell_offsets(self.grid, sequences.device)]


def prepare_request(
    image_family: ImageFamily,
    model: Any,
    vocabulary: int,
    max_length: int | None,
    arguments: Mapping[str, Any],
    processor: Any = None,
) -> ImageRequest:
    """Check the arguments of `generate_images`.

    Defaults come from the generation configuration of `model`. `vocabulary` is the vocabulary size
    of the target, `max_length` its maximal sequence length; `processor` tokenizes prompts. Raises
    ValueError for unknown names, a grid that the model cannot generate, guidance without an
    unconditional prompt, and a text prompt for a model that has no text input.
    """
    unknown = sorted(set(arguments) - {*ARGUMENTS, *ALIASES, NEGATIVE_MASK, *image_family.inputs})
    if unknown:
        known = [*image_family.inputs, *ARGUMENTS, *ALIASES, NEGATIVE_MASK]
        raise ValueError(unknown_message(unknown, known, "generate_images()"))
    arguments = _translate_aliases(arguments)
    grid = _resolve_grid(image_family, arguments.get("grid"), vocabulary)
    arguments = _tokenize_arguments(image_family, processor, grid, arguments)
    request = image_family.request({n: arguments[n] for n in image_family.inputs if n in arguments})
    inputs = _repeat_rows(
        request, _check_num_return_sequences(arguments.get("num_return_sequences"))
    )
    length = inputs["attention_mask"].shape[1]
    if max_length is not None and length + grid.length > max_length:
        raise ValueError(
            f"a prompt of {length} tokens and an image of {grid.length} do not fit into the "
            f"{max_length} positions of {image_family.name}; give a smaller grid="
        )
    start = inputs["attention_mask"].sum(-1, keepdim=True)
    sampling, seed = _resolve_sampling(model, grid, inputs, arguments), arguments.get("seed")
    return ImageRequest(
        image_family,
        grid,
        _add_guidance(image_family, model, inputs, arguments),
        replace(sampling, position_processors=(GridMask(grid, start),)),
        Stop(grid.length),
        fresh_seed(moves=sampling.do_sample) if seed is None else int(seed),
        arguments.get("row_ids"),
    )


def cell_offsets(grid: Grid, device: torch.device) -> Tensor:  # (H, W)
    """Token offsets of the cells of a grid."""
    rows = torch.arange(grid.height, device=device)[:, None] * grid.period
    return len(grid.header) + rows + torch.arange(grid.width, device=device)


def tokenize_prompts(processor: Any, texts: Sequence[str], **options: Any) -> Mapping[str, Any]:
    """Token ids (B, L) of prompts, padded on the left, and their attention mask."""
    padding = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    try:
        encoding = processor(text=list(texts), **options, **padding)
    except ValueError as error:
        raise ValueError(f"prompt: {error} (give a text without image tokens)") from error
    return {name: encoding[name] for name in ("input_ids", "attention_mask")}


def fixed_layout(name: str, size: tuple[int, int], codes: int) -> Callable[[int, int], Grid]:
    """The `layout` of a model with a single image size, using all its codes."""

    def layout(height: int, width: int) -> Grid:
        if (height, width) != size:
            raise ValueError(
                f"a grid of {height} x {width} does not fit: {name} generates {size[0]} x {size[1]}"
                " codes only; drop the size"
            )
        return Grid(height, width, (0, codes))

    return layout


def token_request(model: Any, vocabulary: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The `request` of models whose prompt is token ids of a vocabulary of this size.

    Without a mask, padding is inferred as the model's `generate()` does.
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
            f"the prompt has image tokens ({mark}), but {type(model).__name__} is conditioned on "
            "text only; remove the image token from the text"
        )
    mask = inputs.get("attention_mask")
    mask = infer_mask(model, ids) if mask is None else mask
    mask = torch.ones_like(ids) if mask is None else mask
    if bool((mask[:, -1] == 0).any()):
        raise ValueError("the prompts are padded on the right; pad on the left")
    return {"input_ids": ids, "attention_mask": mask.long()}


def _translate_aliases(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the names of transformers' `generate()` and processors by the ones used here."""
    given = {n: value for n, value in arguments.items() if n not in ALIASES and n != NEGATIVE_MASK}
    mask = arguments.get(NEGATIVE_MASK)
    if mask is not None and arguments.get("negative_prompt_ids") is None:
        raise ValueError(
            f"{NEGATIVE_MASK}= belongs to negative_prompt_ids=, which is missing; give both"
        )
    for theirs, ours in ALIASES.items():
        value = arguments.get(theirs)
        if value is None:
            continue
        if given.get(ours) is not None:
            raise ValueError(f"{theirs}= and {ours}= set the same option; give one of them")
        if ours == "grid":
            value = _read_image_sizes(value)
        elif ours == "negative":
            value = {"input_ids": value, "attention_mask": mask}
        given[ours] = value
    return given


def _read_image_sizes(sizes: Any) -> tuple[int, int]:
    """The rows and columns in the processor's output, which must be equal for all prompts."""
    rows = sizes.tolist() if isinstance(sizes, Tensor) else sizes
    is_list = isinstance(rows, list | tuple) and all(map(_is_pair, rows))
    if not is_list or len(found := {tuple(size) for size in rows}) != 1:
        raise ValueError(
            f"image_sizes={format_value(sizes)} are not one size; images of one call have one "
            "size: give (height, width) per prompt, as the processor does"
        )
    height, width = found.pop()
    return int(height), int(width)


def _is_pair(size: Any) -> bool:
    return isinstance(size, list | tuple) and len(size) == 2 and all(map(is_integer, size))


def _tokenize_arguments(
    image_family: ImageFamily, processor: Any, grid: Grid, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments with text prompts replaced by tensors."""
    prompt, negative = arguments.get("prompt"), arguments.get("negative")
    rest = {name: value for name, value in arguments.items() if name != "prompt"}
    texts = [prompt] if isinstance(prompt, str) else prompt
    if texts is not None:
        clash = [name for name in image_family.inputs if name in arguments]
        if clash:
            raise ValueError(f"prompt= and {', '.join(clash)}= both give a prompt; give one")
        rest |= tokenize_texts(image_family, processor, texts, grid)
    if negative is not None and not (isinstance(negative, Mapping) and negative):
        if not isinstance(negative, str | list | tuple):
            raise ValueError(
                f"negative={format_value(negative)} is not a prompt; give a text, a list of texts, "
                "or the processor's output for one"
            )
        others = [negative] if isinstance(negative, str) else negative
        with prefix_errors("negative"):
            rest["negative"] = tokenize_texts(image_family, processor, others, grid)
    return rest


def tokenize_texts(
    image_family: ImageFamily, processor: Any, texts: Sequence[str], grid: Grid
) -> Mapping[str, Any]:
    """Text prompts as tensors of a request. Raises ValueError for models without text input."""
    if image_family.tokenize_prompts is None:
        raise ValueError(
            f"{image_family.name} takes no text prompt; give its inputs: "
            f"generate_images({'=..., '.join(image_family.inputs)}=...)"
        )
    if processor is None:
        raise ValueError(
            "a text prompt needs the model's processor; give it once, as accelerate(model, "
            f"processor=...), or pass its tensors ({', '.join(image_family.inputs)})"
        )
    listed = isinstance(texts, list | tuple) and len(texts) > 0
    if not listed or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"prompt={texts!r} must be a text or a non-empty list of texts")
    tensors, device = (
        image_family.tokenize_prompts(processor, texts, grid),
        image_family.codebook.vectors.device,
    )
    return {name: value.to(device) for name, value in tensors.items()}


def _resolve_grid(family: ImageFamily, given: Any, vocabulary: int) -> Grid:
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
                f"the grid has tokens that are not image tokens of {family.name}; give rows and "
                "columns only: grid=(height, width)"
            )
        return given
    return build_grid(family, given)


def build_grid(family: ImageFamily, given: Any) -> Grid:
    """The grid of the given (height, width), or of the family's default size."""
    size = family.size if given is None else given
    if size is None:
        raise ValueError(f"{family.name} has no default size; give grid=(height, width) in codes")
    if not _is_pair(size) or min(size) < 1:
        raise ValueError(
            f"grid={given!r} is not a size; give (height, width) in codes, at least 1, or a Grid"
        )
    return family.layout(int(size[0]), int(size[1]))


def _add_guidance(
    family: ImageFamily, model: Any, inputs: dict[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Add scale and unconditional prompt to the inputs, if there is guidance."""
    own = model.generation_config.guidance_scale if model.can_generate() else None
    scales = (arguments.get("guidance"), own, family.guidance)
    scale = next(value for value in scales if value is not None)
    check_number("guidance", scale, 0, example=5)
    negative = arguments.get("negative")
    if negative is not None:
        with prefix_errors("negative"):
            unknown = sorted({*negative} - {*family.inputs, IMAGE_SIZES})
            if unknown:
                raise ValueError(unknown_message(unknown, family.inputs, "an unconditional prompt"))
            negative = _expand_negative(family.request(negative), inputs, arguments)
    if scale == 1:
        return inputs
    if negative is None and family.unconditional is not None:
        negative = family.unconditional(inputs)
    if negative is None:
        raise ValueError(
            f"guidance={scale} needs an unconditional prompt, and {family.name} has no default; "
            "give negative= the processor's output for one, or guidance=1"
        )
    return {**inputs, SCALE: scale, NEGATIVE: negative}


def _expand_negative(
    negative: dict[str, Any], inputs: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Repeat unconditional prompts, one for all or one per prompt, to one per image."""
    pictures = len(inputs["attention_mask"])
    prompts = pictures // _check_num_return_sequences(arguments.get("num_return_sequences"))
    given = len(negative["attention_mask"])
    if given not in (1, prompts):
        raise ValueError(
            f"{prompts} prompts have {given} unconditional ones; give one for all, or one for each"
        )
    return _repeat_rows(negative, pictures // given)


def _repeat_rows(request: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Repeat every row of a request, copies adjacent."""
    return {name: value.repeat_interleave(times, 0) for name, value in request.items()}


def _check_num_return_sequences(given: Any) -> int:
    """The number of images per prompt."""
    times = 1 if given is None else given
    check_number("num_return_sequences", times, 1, whole=True)
    return int(times)


def _resolve_sampling(
    model: Any, grid: Grid, inputs: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Sampling:
    """Sampling settings as the model's own `generate()` resolves them.

    Arguments override the generation configuration, which overrides the defaults of transformers.
    A model without `generate()` (LlamaGen) samples from the whole distribution by default.
    """
    given = infer_do_sample(
        {name: arguments[name] for name in SAMPLING_ARGUMENTS if arguments.get(name) is not None}
    )
    if not model.can_generate():
        return Sampling(**given)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    # the backbone applies guidance, and the inputs hold one row per image
    settings = {**given, "guidance_scale": 1.0, "num_return_sequences": 1}
    settings["max_new_tokens"] = grid.length
    sampling, _ = resolve(
        model, settings, ids.shape[1], ids.device, batch=len(ids), inputs=ids, attention_mask=mask
    )
    if sampling.needs_prefix and bool((ids == FOREIGN).any()):
        names = ", ".join(sorted(type(one).__name__ for one in sampling.processors))
        raise ValueError(
            f"{names} reads the prompt, but the prompt of {type(model).__name__} is not in the "
            "vocabulary of its codes; remove the setting from the model's generation_config"
        )
    return sampling
