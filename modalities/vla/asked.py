"""What is asked of `predict_action`, checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmspec.distributions.sampling import PlaceProcessor, Sampling
from mmspec.errors import check_flag, check_number, refuse_fixed, unknown_message
from mmspec.modalities.common.tokens import carrier
from mmspec.modalities.vla.reading import PromptReader, cameras_of, instructions_of
from mmspec.modalities.vla.robots import numbers_of
from mmspec.targets.tokens.generation_settings import sampled

WARPS = ("temperature", "top_k", "top_p", "min_p")
OWN = (
    *("image", "instruction", "unnorm_key", "robots", "deadline_ms", "evaluate", "seed"),
    *("do_sample", *WARPS),
)
FIXED = ("max_new_tokens", "min_new_tokens", "max_length", "eos_token_id", "row_ids")


@dataclass(frozen=True)
class ActionQuestion:
    """A question about the next action of one robot or of several."""

    inputs: Mapping[str, Tensor]  # of the prompts (B, L)
    robots: Sequence[int]  # B numbers
    is_single: bool  # whether one robot was asked for, and not a list of them
    key: str | None  # whose action statistics
    deadline_ms: float | None
    is_evaluated: bool
    sampling: Sampling
    seed: int | None


def prepare(
    reader: PromptReader | None,
    inputs: frozenset[str],
    allowed: PlaceProcessor,
    args: Sequence[Any],
    arguments: Mapping[str, Any],
) -> ActionQuestion:
    """A question out of the arguments of a call. Raises ValueError for what cannot be asked.

    `inputs` are the tensors that the model takes; with them there need not be a `reader`.
    """
    given = _placed(args, arguments)
    why = (
        "an action has as many tokens as the robot has components, and robots= says whose rows "
        "they are"
    )
    refuse_fixed(given, FIXED, "predict_action()", why)
    tensors = {name: one for name, one in given.items() if name in inputs and one is not None}
    unknown = sorted(set(given) - set(OWN) - inputs)
    if unknown:
        raise ValueError(unknown_message(unknown, (*OWN, *sorted(inputs)), "predict_action()"))
    evaluated = given.get("evaluate", False)
    check_flag("evaluate", evaluated)
    if tensors:
        read, count, is_single = _read_already(tensors, given), len(carrier(tensors)), False
        is_single = count == 1 and given.get("robots") is None
    else:
        read, count, is_single = _read(reader, given)
    deadline = given.get("deadline_ms")
    check_deadline(deadline)
    return ActionQuestion(
        inputs=read,
        robots=numbers_of(given.get("robots"), count),
        is_single=is_single,
        key=given.get("unnorm_key"),
        deadline_ms=deadline,
        is_evaluated=evaluated,
        sampling=_sampling(given, allowed),
        seed=given.get("seed"),
    )


def check_deadline(deadline_ms: Any) -> None:
    """Refuse what is no time. Raises ValueError."""
    if deadline_ms is not None:
        check_number("deadline_ms", deadline_ms, example=50)
        if deadline_ms <= 0:
            raise ValueError(
                f"deadline_ms={deadline_ms!r} is over before it begins; give milliseconds above 0"
            )


def _placed(args: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Picture and instruction may come by place."""
    named = dict(zip(("image", "instruction"), args, strict=False))
    if len(args) > 2 or set(named) & set(arguments):
        raise ValueError(
            "predict_action() takes a picture and an instruction by place, once, and the rest by "
            "name: predict_action(image, instruction, unnorm_key=...)"
        )
    return {**named, **arguments}


def _read(
    reader: PromptReader | None, given: Mapping[str, Any]
) -> tuple[dict[str, Any], int, bool]:
    image, instruction = given.get("image"), given.get("instruction")
    if image is None or instruction is None:
        missing = " and ".join(n for n in ("image", "instruction") if given.get(n) is None)
        raise ValueError(
            f"predict_action() needs the camera's picture and an instruction; {missing} is missing"
        )
    if reader is None:
        raise ValueError(
            "pictures and words need the policy's processor; give it once, as accelerate(model, "
            "processor=...), or give the tensors that it makes"
        )
    words, is_single = instructions_of(instruction)
    cameras = cameras_of(image, is_single)
    if len(cameras) != len(words):
        raise ValueError(
            f"{len(cameras)} pictures for {len(words)} instructions; give one of each per robot"
        )
    return reader.read(cameras, words), len(words), is_single


def _read_already(tensors: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("image") is not None or given.get("instruction") is not None:
        raise ValueError(
            f"image and instruction go without {', '.join(tensors)}, which hold both already"
        )
    if "input_ids" not in tensors and "inputs_embeds" not in tensors:
        raise ValueError(
            f"{', '.join(tensors)} without input_ids; give all that the processor makes"
        )
    return dict(tensors)


def _sampling(given: Mapping[str, Any], allowed: PlaceProcessor) -> Sampling:
    """Greedy if nothing is said; a temperature above 0, or another warper, draws."""
    how = {name: given[name] for name in ("do_sample", *WARPS) if given.get(name) is not None}
    return Sampling(**{"do_sample": False, **sampled(how)}, places=(allowed,))
