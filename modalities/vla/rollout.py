"""Episodes in closed loop: the policy answers, the world moves, and both are written down."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mmspec.errors import check_number, described
from mmspec.modalities.vla.step_stats import ActionStats, ActionStep

Asked = tuple[Any, str]  # picture, words
Answered = tuple[np.ndarray, ActionStep]  # actions (n, D)
Act = Callable[[Any, str], Answered]
Tell = Callable[[np.ndarray, Any], None]  # the action (D,) carried out, the state it led to


class Environment(Protocol):
    """A `gymnasium.Env` whose observation holds "image" (H, W, 3) uint8, and "state" if known."""

    action_space: Any

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...
    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


@dataclass(frozen=True)
class Rollout:
    """An episode as it went; T actions of D components in the robot's units."""

    images: list[np.ndarray]  # T + 1 of (H, W, 3) uint8: what the camera saw
    actions: np.ndarray  # (T, D)
    states: list[np.ndarray]  # T + 1 of (n,); none where the world has none
    tokens: list[list[int]]  # of every question
    instructions: list[str]  # of every question
    is_success: bool
    steps: tuple[ActionStep, ...]  # of every question
    stats: ActionStats | None = None
    seed: int | None = None

    @property
    def seconds(self) -> float:
        """What the policy took; the world's own time is not in it."""
        return sum(one.latency_ms for one in self.steps) / 1e3


Walk = Generator[Asked, Answered, Rollout]  # an episode that asks, and waits for the answer


def roll_out(
    environment: Environment,
    act: Act,
    tell: Tell,
    seed: int | None = None,
    instruction: str | None = None,
    steps: int | None = None,
) -> Rollout:
    """Let `act` answer until the world ends the episode, or after so many `steps`; see `walk`."""
    walks = [walk(environment, tell, seed, instruction, steps)]
    (found,) = side_by_side(walks, lambda _, asked: [act(*one) for one in asked])
    return found


def side_by_side(
    walks: Sequence[Walk], act: Callable[[Sequence[int], Sequence[Asked]], Sequence[Answered]]
) -> list[Rollout]:
    """Several episodes at once: `act` is asked for all that are under way, by their places."""
    asked = dict(enumerate(map(next, walks)))
    done: dict[int, Rollout] = {}
    while asked:
        places = list(asked)
        for at, answer in zip(places, act(places, list(asked.values())), strict=True):
            try:
                asked[at] = walks[at].send(answer)
            except StopIteration as end:
                done[at] = end.value
                del asked[at]
    return [done[at] for at in range(len(walks))]


def walk(
    environment: Environment,
    tell: Tell,
    seed: int | None = None,
    instruction: str | None = None,
    steps: int | None = None,
) -> Walk:
    """An episode until the world ends it, or after so many `steps`.

    Without an `instruction` each question takes the world's own (`info["instruction"]`), which may
    change on the way. Actions of a chunk are carried out one after the other. Raises ValueError
    for a world that shows no picture or, without an instruction, says none.
    """
    if steps is not None:
        check_number("steps", steps, 1, whole=True, example=80)
    observation, info = environment.reset(seed=seed)
    kind = environment.action_space.dtype
    images, states = [_picture(observation)], [observation.get("state")]
    actions: list[np.ndarray] = []
    answers: list[ActionStep] = []
    words: list[str] = []
    is_over = is_success = False
    while not is_over:
        words.append(_words(instruction, info))
        chunk, answer = yield images[-1], words[-1]
        answers.append(answer)
        for action in chunk:
            observation, _, terminated, truncated, info = environment.step(action.astype(kind))
            actions.append(action)
            images.append(_picture(observation))
            states.append(observation.get("state"))
            tell(action, states[-1])
            is_success = is_success or bool(info.get("is_success", False))
            is_over = bool(terminated or truncated) or (steps is not None and len(actions) >= steps)
            if is_over:
                break
    return Rollout(
        images=images,
        actions=np.stack(actions),
        states=[one for one in states if one is not None],
        tokens=[list(one.tokens) for one in answers],
        instructions=words,
        is_success=is_success,
        steps=tuple(answers),
        seed=seed,
    )


def check_worlds(worlds: Sequence[Any]) -> Sequence[Any]:
    """Refuse no worlds, and one that is there twice. Raises ValueError."""
    if not worlds:
        raise ValueError("environment=[] holds no world; give one for every robot")
    own = [id(one) for one in worlds if not isinstance(one, str)]
    if len(set(own)) < len(own):
        raise ValueError("a world is in environment= twice; make one for every robot")
    return worlds


def _picture(observation: Any) -> np.ndarray:
    if not isinstance(observation, dict) or "image" not in observation:
        raise ValueError(
            f"the world observes {described(observation)}; a policy needs a dictionary with the "
            "camera's picture as 'image', (H, W, 3) of uint8"
        )
    found: np.ndarray = observation["image"]
    return found


def _words(instruction: str | None, info: dict[str, Any]) -> str:
    if instruction is None and "instruction" not in info:
        raise ValueError("the world says no instruction; give instruction= some words")
    return instruction if instruction is not None else str(info["instruction"])
