"""Requests of `predict_action`, checked before inputs are encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmspec.distributions.sampling import PositionProcessor, Sampling
from mmspec.errors import check_flag, check_number, refuse_fixed, unknown_message
from mmspec.modalities.common.tokens import prompt_tensor
from mmspec.modalities.vla.inputs import PromptReader, split_cameras, split_instructions
from mmspec.modalities.vla.robots import parse_robots
from mmspec.targets.tokens.generation_settings import infer_do_sample

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
OWN = (
    *("image", "instruction", "unnorm_key", "robots", "deadline_ms", "evaluate", "seed"),
    *("do_sample", *SAMPLING),
    "on_round",
)
FIXED = ("max_new_tokens", "min_new_tokens", "max_length", "eos_token_id", "row_ids")


@dataclass(frozen=True)
class ActionRequest:
    """A request for the next action of one robot or several."""

    inputs: Mapping[str, Tensor]  # of the prompts (B, L)
    robots: Sequence[int]  # B numbers
    is_single: bool  # one robot, not a list
    key: str | None  # the data set of the action statistics
    deadline_ms: float | None
    is_evaluated: bool
    sampling: Sampling
    seed: int | None


def prepare_request(
    reader: PromptReader | None,
    inputs: frozenset[str],
    allowed: PositionProcessor,
    args: Sequence[Any],
    arguments: Mapping[str, Any],
) -> ActionRequest:
    """Make a request from the arguments of a call. Raises ValueError for bad arguments.

    `inputs` are the names of tensors that the model takes; given as tensors, no `reader` is needed.
    """
    given = _name_arguments(args, arguments)
    why = "an action has one token per component; drop it, and give robots= for several rows"
    refuse_fixed(given, FIXED, "predict_action()", why)
    tensors = {name: one for name, one in given.items() if name in inputs and one is not None}
    unknown = sorted(set(given) - set(OWN) - inputs)
    if unknown:
        raise ValueError(unknown_message(unknown, (*OWN, *sorted(inputs)), "predict_action()"))
    evaluated = given.get("evaluate", False)
    check_flag("evaluate", evaluated)
    if tensors:
        read, count, is_single = _check_tensors(tensors, given), len(prompt_tensor(tensors)), False
        is_single = count == 1 and given.get("robots") is None
    else:
        read, count, is_single = _read_images(reader, given)
    deadline = given.get("deadline_ms")
    check_deadline(deadline)
    return ActionRequest(
        inputs=read,
        robots=parse_robots(given.get("robots"), count),
        is_single=is_single,
        key=given.get("unnorm_key"),
        deadline_ms=deadline,
        is_evaluated=evaluated,
        sampling=_sampling(given, allowed),
        seed=given.get("seed"),
    )


def check_deadline(deadline_ms: Any) -> None:
    """Raises ValueError for a deadline that is not positive."""
    if deadline_ms is not None:
        check_number("deadline_ms", deadline_ms, example=50)
        if deadline_ms <= 0:
            raise ValueError(f"deadline_ms={deadline_ms!r} must be above 0; give milliseconds")


def _name_arguments(args: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Name the positional arguments, image and instruction."""
    named = dict(zip(("image", "instruction"), args, strict=False))
    if len(args) > 2 or set(named) & set(arguments):
        raise ValueError(
            "predict_action() takes two positional arguments, image and instruction; give the "
            "rest by name: predict_action(image, instruction, unnorm_key=...)"
        )
    return {**named, **arguments}


def _read_images(
    reader: PromptReader | None, given: Mapping[str, Any]
) -> tuple[dict[str, Any], int, bool]:
    image, instruction = given.get("image"), given.get("instruction")
    if image is None or instruction is None:
        missing = " and ".join(n for n in ("image", "instruction") if given.get(n) is None)
        raise ValueError(
            f"predict_action() needs a camera image and an instruction; {missing} is missing, give "
            "both: predict_action(image, instruction)"
        )
    if reader is None:
        raise ValueError(
            "images and instructions need the policy's processor; give it once, as "
            "accelerate(model, processor=...), or give the tensors that it returns"
        )
    instructions, is_single = split_instructions(instruction)
    cameras = split_cameras(image, is_single)
    if len(cameras) != len(instructions):
        raise ValueError(
            f"{len(cameras)} images for {len(instructions)} instructions; give one of each per "
            "robot"
        )
    return reader.read(cameras, instructions), len(instructions), is_single


def _check_tensors(tensors: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("image") is not None or given.get("instruction") is not None:
        raise ValueError(
            f"{', '.join(tensors)} already contain image and instruction; give one or the other"
        )
    if "input_ids" not in tensors and "inputs_embeds" not in tensors:
        raise ValueError(
            f"{', '.join(tensors)} without input_ids; give all tensors of the processor"
        )
    return dict(tensors)


def _sampling(given: Mapping[str, Any], allowed: PositionProcessor) -> Sampling:
    """Greedy by default; a temperature above 0, or another warper, samples."""
    warpers = {
        name: given[name] for name in ("do_sample", *SAMPLING) if given.get(name) is not None
    }
    return Sampling(
        **{"do_sample": False, **infer_do_sample(warpers)}, position_processors=(allowed,)
    )
