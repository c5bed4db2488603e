"""Prepare the tensors of a policy from images and instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image
from torch import Tensor
from torch.nn import functional

from mmspec.errors import format_value
from mmspec.models.prismatic_processor import EMPTY, PROMPT


@runtime_checkable
class InstructionProcessor(Protocol):
    """A processor that formats instructions and places image tokens itself."""

    def instruct(
        self, instruction: Sequence[str], images: Sequence[Sequence[Image.Image]]
    ) -> Mapping[str, Tensor]: ...


def check_instruction(instruction: Any) -> str:
    """Lower-case an instruction. Raises ValueError for what is no text, or an empty one."""
    if not isinstance(instruction, str) or not instruction.strip():
        raise ValueError(
            f"instruction={instruction!r} is empty or no text; give a string, such as 'reach the "
            "red circle'"
        )
    return instruction.strip().lower()


def load_image(image: Any) -> Image.Image:
    """An RGB image of any size. Raises ValueError for what is no image."""
    if isinstance(image, Image.Image):
        found = image
    else:
        pixels = image.numpy(force=True) if isinstance(image, Tensor) else image
        is_array = isinstance(pixels, np.ndarray)
        if not is_array or pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            given = f"{pixels.dtype} {pixels.shape}" if is_array else format_value(image)
            raise ValueError(
                f"image={given} is not a camera image; give a PIL image, or (H, W, 3) of uint8"
            )
        if not pixels.size:
            raise ValueError(f"image of shape {pixels.shape} has no pixels; give (H, W, 3)")
        found = Image.fromarray(np.ascontiguousarray(pixels))
    return found if found.mode == "RGB" else found.convert("RGB")


class PromptReader:
    """Encodes instructions and camera images of a policy.

    An `InstructionProcessor` formats prompts itself; for others of transformers the prompt is an
    image token per image, followed by OpenVLA's prompt.
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
                f"robots of {' and '.join(map(str, counts))} cameras in one batch; give the same "
                "number of images for each"
            )
        made = self._apply_processor(cameras, instructions)
        return {name: self._move_to_model(value) for name, value in made.items()}

    def _apply_processor(
        self, cameras: Sequence[Sequence[Image.Image]], instructions: Sequence[str]
    ) -> Mapping[str, Tensor]:
        if isinstance(self.processor, InstructionProcessor):
            return self.processor.instruct(list(instructions), [list(own) for own in cameras])
        mark = vars(self.processor).get("image_token")
        if mark is None:
            raise ValueError(
                f"{type(self.processor).__name__} has neither instruct() nor an image token; give "
                "the tensors that it returns: predict_action(**processor(...))"
            )
        texts = [
            f"{mark * len(own)}\n{PROMPT.format(instruction=one)}"
            for own, one in zip(cameras, instructions, strict=True)
        ]
        images = [one for own in cameras for one in own]
        options = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
        made: Mapping[str, Tensor] = self.processor(text=texts, images=images, **options)
        return made

    def _move_to_model(self, value: Tensor) -> Tensor:
        kind = self.model.dtype if value.is_floating_point() else None
        return value.to(self.model.device, kind)


def append_empty_token(config: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Append the empty token of Llama's tokenizer to prompts of OpenVLA.

    The model was trained with it, its processor omits it, and its own `predict_action` appends it.
    Rows are padded on the left, or not at all.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    has_token = config.model_type == "openvla" and config.get_text_config().vocab_size > EMPTY[0]
    if ids is None or not has_token or bool((ids[:, -1] == EMPTY[0]).any()):
        return inputs
    made = {**inputs, "input_ids": functional.pad(ids, (0, 1), value=EMPTY[0])}
    return (
        made if mask is None else {**made, "attention_mask": functional.pad(mask, (0, 1), value=1)}
    )


def split_cameras(image: Any, is_single: bool) -> list[list[Image.Image]]:
    """The images of each robot, of one camera or a list of them."""
    if is_single:
        return [_list_images(image)]
    if isinstance(image, np.ndarray | Tensor) and image.ndim == 4:
        image = list(image)
    if not isinstance(image, list | tuple):
        raise ValueError(
            f"several instructions, but image={format_value(image)}; give a list with the image of "
            "each robot"
        )
    return [_list_images(one) for one in image]


def _list_images(image: Any) -> list[Image.Image]:
    if isinstance(image, list | tuple):
        if not image:
            raise ValueError("a robot has no image; give one per camera")
        return [load_image(one) for one in image]
    return [load_image(image)]


def split_instructions(instruction: Any) -> tuple[list[str], bool]:
    """One per robot, and whether there is a single robot. Raises ValueError if not text."""
    if isinstance(instruction, list | tuple):
        if not instruction:
            raise ValueError("instruction=[] names no robot; give one instruction per robot")
        return [check_instruction(one) for one in instruction], False
    return [check_instruction(instruction)], True
