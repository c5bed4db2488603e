"""Rollouts: run a policy and an environment in closed loop, and record both."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mmspec.errors import check_number, format_value
from mmspec.modalities.vla.step_stats import ActionStats, ActionStep

PolicyRequest = tuple[Any, str]  # image, instruction
PolicyResponse = tuple[np.ndarray, ActionStep]  # actions (n, D)
OnAction = Callable[[np.ndarray, Any], None]  # executed action (D,), resulting state


class Environment(Protocol):
    """A `gymnasium.Env`; observations have "image" (H, W, 3) uint8, and "state" if available."""

    action_space: Any

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...
    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


@dataclass(frozen=True)
class Rollout:
    """A recorded episode; T actions of D components in the robot's units."""

    images: list[np.ndarray]  # T + 1 of (H, W, 3) uint8, observed
    actions: np.ndarray  # (T, D)
    states: list[np.ndarray]  # T + 1 of (n,); empty if the environment has no states
    tokens: list[list[int]]  # of each request
    instructions: list[str]  # of each request
    is_success: bool
    steps: tuple[ActionStep, ...]  # of each request
    stats: ActionStats | None = None
    seed: int | None = None
    components: tuple[str, ...] = ()  # names of the components of an action

    @property
    def seconds(self) -> float:
        """Total latency of the policy, without the time of the environment."""
        return sum(one.latency_ms for one in self.steps) / 1e3


EpisodeSteps = Generator[
    PolicyRequest, PolicyResponse, Rollout
]  # yields requests, receives responses


def run_in_parallel(
    episodes: Sequence[EpisodeSteps],
    act: Callable[[Sequence[int], Sequence[PolicyRequest]], Sequence[PolicyResponse]],
) -> list[Rollout]:
    """Run several episodes at once: `act` gets the indices and requests of all active ones."""
    requests = dict(enumerate(map(next, episodes)))
    done: dict[int, Rollout] = {}
    while requests:
        indices = list(requests)
        for at, response in zip(indices, act(indices, list(requests.values())), strict=True):
            try:
                requests[at] = episodes[at].send(response)
            except StopIteration as end:
                done[at] = end.value
                del requests[at]
    return [done[at] for at in range(len(episodes))]


def run_episode(
    environment: Environment,
    on_action: OnAction,
    seed: int | None = None,
    instruction: str | None = None,
    steps: int | None = None,
) -> EpisodeSteps:
    """Run an episode until the environment ends it, or for at most `steps` steps.

    The default of `instruction` is `info["instruction"]` of the environment at each request.
    Actions of a chunk are executed in order. Raises ValueError for an environment without an image
    or without any instruction.
    """
    if steps is not None:
        check_number("steps", steps, 1, whole=True, example=80)
    observation, info = environment.reset(seed=seed)
    kind = environment.action_space.dtype
    images, states = [_read_image(observation)], [observation.get("state")]
    actions: list[np.ndarray] = []
    action_steps: list[ActionStep] = []
    instructions: list[str] = []
    is_over = is_success = False
    while not is_over:
        instructions.append(_read_instruction(instruction, info))
        chunk, step = yield images[-1], instructions[-1]
        action_steps.append(step)
        for action in chunk:
            observation, _, terminated, truncated, info = environment.step(action.astype(kind))
            actions.append(action)
            images.append(_read_image(observation))
            states.append(observation.get("state"))
            on_action(action, states[-1])
            is_success = is_success or bool(info.get("is_success", False))
            is_over = bool(terminated or truncated) or (steps is not None and len(actions) >= steps)
            if is_over:
                break
    return Rollout(
        images=images,
        actions=np.stack(actions),
        states=[one for one in states if one is not None],
        tokens=[list(one.tokens) for one in action_steps],
        instructions=instructions,
        is_success=is_success,
        steps=tuple(action_steps),
        seed=seed,
    )


def check_worlds(worlds: Sequence[Any]) -> Sequence[Any]:
    """Raises ValueError for no environments, for what is none, and for one that is given twice."""
    if not worlds:
        raise ValueError("environment=[] is empty; give one environment per robot")
    for one in worlds:
        try:
            assert isinstance(one, str) or (one.reset, one.step, one.action_space)
        except AttributeError as error:
            raise ValueError(
                f"environment={format_value(one)} is none ({error}); give a gymnasium.Env, or a "
                "name such as 'table'"
            ) from None
    own = [id(one) for one in worlds if not isinstance(one, str)]
    if len(set(own)) < len(own):
        raise ValueError("an environment is in environment= twice; create one per robot")
    return worlds


def _read_image(observation: Any) -> np.ndarray:
    if not isinstance(observation, dict) or "image" not in observation:
        raise ValueError(
            f"the environment observes {format_value(observation)}; a policy needs a dictionary "
            "with the camera image as 'image', (H, W, 3) of uint8"
        )
    found: np.ndarray = observation["image"]
    return found


def _read_instruction(instruction: str | None, info: dict[str, Any]) -> str:
    if instruction is None and "instruction" not in info:
        raise ValueError("the environment gives no instruction; give instruction=")
    return instruction if instruction is not None else str(info["instruction"])
