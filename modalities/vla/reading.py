"""From pictures and instructions to the tensors of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image
from torch import Tensor
from torch.nn import functional

from mmspec.errors import described
from mmspec.models.prismatic_processor import EMPTY, PROMPT


@runtime_checkable
class Instructing(Protocol):
    """A processor that knows how instructions are worded, and where pictures stand in them."""

    def instruct(
        self, instruction: Sequence[str], images: Sequence[Sequence[Image.Image]]
    ) -> Mapping[str, Tensor]: ...


def checked_instruction(instruction: Any) -> str:
    """An instruction in small letters. Raises ValueError for what is no text, or an empty one."""
    if not isinstance(instruction, str) or not instruction.strip():
        raise ValueError(
            f"instruction={instruction!r} tells the robot nothing; give words, such as 'reach the "
            "red circle'"
        )
    return instruction.strip().lower()


def checked_picture(image: Any) -> Image.Image:
    """A picture of RGB, of any size. Raises ValueError for what is none."""
    if isinstance(image, Image.Image):
        found = image
    else:
        pixels = image.numpy(force=True) if isinstance(image, Tensor) else image
        is_array = isinstance(pixels, np.ndarray)
        if not is_array or pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            what = f"{pixels.dtype} {pixels.shape}" if is_array else described(image)
            raise ValueError(
                f"image={what} is no camera picture; give a PIL image, or (H, W, 3) of uint8, rows "
                "first and colours last"
            )
        if not pixels.size:
            raise ValueError(f"image of shape {pixels.shape} has no pixels; give (H, W, 3)")
        found = Image.fromarray(np.ascontiguousarray(pixels))
    return found if found.mode == "RGB" else found.convert("RGB")


class PromptReader:
    """What a policy reads: its prompt in words, and the pictures of its cameras.

    A processor that says so itself (`Instructing`) is asked; one of transformers, whose prompts
    hold a mark for every picture, gets OpenVLA's words behind the marks.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor

    def read(
        self, cameras: Sequence[Sequence[Image.Image]], instructions: Sequence[str]
    ) -> dict[str, Tensor]:
        """Tensors of the rows, padded on the left. Raises ValueError where cameras differ."""
        counts = sorted({len(own) for own in cameras})
        if len(counts) > 1:
            raise ValueError(
                f"robots of {' and '.join(map(str, counts))} cameras in one batch; give pictures "
                "of as many cameras for each"
            )
        made = self._made(cameras, instructions)
        return {name: self._moved(value) for name, value in made.items()}

    def _made(
        self, cameras: Sequence[Sequence[Image.Image]], instructions: Sequence[str]
    ) -> Mapping[str, Tensor]:
        if isinstance(self.processor, Instructing):
            return self.processor.instruct(list(instructions), [list(own) for own in cameras])
        mark = vars(self.processor).get("image_token")
        if mark is None:
            raise ValueError(
                f"{type(self.processor).__name__} neither words instructions nor marks pictures in "
                "prompts; give the tensors that it makes: predict_action(**processor(...))"
            )
        texts = [
            f"{mark * len(own)}\n{PROMPT.format(instruction=one)}"
            for own, one in zip(cameras, instructions, strict=True)
        ]
        images = [one for own in cameras for one in own]
        how = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
        made: Mapping[str, Tensor] = self.processor(text=texts, images=images, **how)
        return made

    def _moved(self, value: Tensor) -> Tensor:
        kind = self.model.dtype if value.is_floating_point() else None
        return value.to(self.model.device, kind)


def ended(config: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Prompts of an OpenVLA that speaks Llama's words, with its empty token at their end.

    Policies were trained to act behind it, its processor leaves it out, and so its own
    `predict_action` puts it there. Rows are padded on the left, or not at all.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    speaks = config.model_type == "openvla" and config.get_text_config().vocab_size > EMPTY[0]
    if ids is None or not speaks or bool((ids[:, -1] == EMPTY[0]).any()):
        return inputs
    made = {**inputs, "input_ids": functional.pad(ids, (0, 1), value=EMPTY[0])}
    return (
        made if mask is None else {**made, "attention_mask": functional.pad(mask, (0, 1), value=1)}
    )


def cameras_of(image: Any, is_single: bool) -> list[list[Image.Image]]:
    """The pictures of every robot, each of one camera or of a list of them."""
    if is_single:
        return [_of_robot(image)]
    if isinstance(image, np.ndarray | Tensor) and image.ndim == 4:
        image = list(image)
    if not isinstance(image, list | tuple):
        raise ValueError(
            f"several instructions, but image={described(image)}; give a list with the picture of "
            "every robot"
        )
    return [_of_robot(one) for one in image]


def _of_robot(image: Any) -> list[Image.Image]:
    if isinstance(image, list | tuple):
        if not image:
            raise ValueError("a robot without a picture; give one of each of its cameras")
        return [checked_picture(one) for one in image]
    return [checked_picture(image)]


def instructions_of(instruction: Any) -> tuple[list[str], bool]:
    """One per robot, and whether there is a single robot. Raises ValueError for what is no text."""
    if isinstance(instruction, list | tuple):
        if not instruction:
            raise ValueError("instruction=[] names no robot; give one instruction per robot")
        return [checked_instruction(one) for one in instruction], False
    return [checked_instruction(instruction)], True
