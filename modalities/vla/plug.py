"""Robot policies bound to a recipe: `predict_action`, and what a control loop needs beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import copyfile
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor

from mmspec import recipes, zoo
from mmspec.codes.actions import ActionSpace
from mmspec.codes.trajectories import FILE
from mmspec.errors import described, reading, unknown_message
from mmspec.modalities.common import tokens
from mmspec.modalities.common.families import reader
from mmspec.modalities.common.text import Text
from mmspec.modalities.vla import MODALITY, lerobot
from mmspec.modalities.vla.acting import AnswerPace, Deadline
from mmspec.modalities.vla.answering import (
    ActionsOnly,
    BoundPolicy,
    answer,
    fresh_episodes,
)
from mmspec.modalities.vla.asked import OWN as ASKED
from mmspec.modalities.vla.asked import ActionQuestion, check_deadline, prepare
from mmspec.modalities.vla.reading import PromptReader, ended
from mmspec.modalities.vla.robots import Robots, numbers_of, rows_of
from mmspec.modalities.vla.rollout import (
    Answered,
    Asked,
    Rollout,
    Tell,
    check_worlds,
    side_by_side,
    walk,
)
from mmspec.modalities.vla.spaces import ActionSpaces, check_drafter, check_free, chunk_of
from mmspec.modalities.vla.step_stats import ActionStats, ActionStep, summed_up
from mmspec.modalities.vla.worlds import make_world
from mmspec.modality import Loop
from mmspec.models.loading import load_causal
from mmspec.recipe import Recipe
from mmspec.registry import ZOO
from mmspec.targets.readers.visual import check_request

OWN = ("processor", "actions", "unnorm_key", "deadline_ms")
PLAIN = "plain"
Answers = list[tuple[np.ndarray, ActionStep]]


@dataclass
class PolicyBinder:
    """Binds a recipe to a policy, once for every data set whose statistics are asked for."""

    backbone: Any
    recipe: Recipe
    drafter: Any
    parts: Mapping[str, Any]
    spaces: ActionSpaces
    made: dict[str | None, BoundPolicy] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def bind(self, key: str | None) -> BoundPolicy:
        """Raises ValueError for parts that do not fit, and for a name that is not known."""
        with self.lock:
            if key not in self.made:
                self.made[key] = self._bind(self.spaces.space(key))
            return self.made[key]

    def first(self) -> BoundPolicy:
        """The one that is meant where nothing is said; of several data sets the first."""
        return self.bind(self.spaces.default)

    def _bind(self, space: Any) -> BoundPolicy:
        small = self.drafter
        for other in self.made.values():  # read from its folder once
            small = small if other.bound.draft_model is None else other.bound.draft_model.model
        check_drafter(small, space.codes)
        check_free(space.codes, self.backbone)
        parts = {**self.parts, "actions": space}
        bound = tokens.bind(self.backbone, self.recipe, small, parts)
        if bound.draft_model is not None:
            check_drafter(bound.draft_model.model, space.codes)
        own = {"check": self.parts.get("check", True)}
        plain = tokens.bind(self.backbone, recipes.get(PLAIN), None, own)
        return BoundPolicy(bound, plain, space, chunk_of(bound.model.config))


class PolicySession(tokens.TokenSession):
    """A policy bound to a recipe, and the robots that it drives.

    Robots have numbers; one that is alone is robot 0. What was predicted counts as carried out at
    the next question, until `observe` has told better once in the episode; from then on only what
    it tells counts.
    """

    calls = ("predict_action", "select_action", "rollout", "generate", "__call__")
    methods = ("observe", "reset", "steps")

    def __init__(self, binder: PolicyBinder, processor: Any, deadline_ms: float | None) -> None:
        first = binder.first()
        super().__init__(first.bound)
        self.binder, self.processor, self.deadline_ms = binder, processor, deadline_ms
        self.text = Text(first.bound, shared=partial(fresh_episodes, first.space))
        self.signature = self.text.signature
        self.robots, self.pace = Robots(), AnswerPace()
        self.last: ActionStats | None = None

    def save(self, folder: Path) -> None:
        """The draft model's weights, and the trajectories beside them that the recipe looks in."""
        super().save(folder)
        model = self.bound.draft_model
        if model is not None and self.recipe.options.get("store", "") is None:
            stored = Path(model.model.config._name_or_path) / FILE
            if stored.is_file():
                copyfile(stored, folder / FILE)

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        """`generate` as the model's own; others as `PolicySession` says under their names."""
        if call == "generate":
            return self.text.generate(args, arguments, loop)
        if call == "__call__":
            return self.text.hook(args, arguments, loop)
        if call == "predict_action":
            return self.predict_action(args, arguments, loop)
        ask = self.select_action if call == "select_action" else self.rollout
        return ask(args, arguments, loop)

    def predict_action(
        self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> np.ndarray:
        """The next action (D,), or (chunk, D) of a policy that says several; float64.

        Takes the camera's picture (PIL, or (H, W, 3) uint8; a list of several cameras) and an
        instruction, by place or by name; or the tensors of the policy's processor, as OpenVLA does.
        Lists of both ask for several robots at once, and arrays (B, D) come out; `robots=` are
        their numbers (0, 1, ... if not said), so that those that are done can be left out.
        `unnorm_key` names the data set whose action statistics count; `deadline_ms` says how long
        it may take, the reading included; `evaluate=True` also asks the target by itself, behind
        the clock, and notes how far the action is from its own. Greedy, unless a `temperature`
        (`top_k`, `top_p`, `min_p`, `do_sample`) is given; `seed` as everywhere.
        """
        begun = perf_counter()
        question = self.question(args, arguments)
        found = self._answers(question, loop, begun)
        self._report(question, found, loop)
        actions = np.stack([action for action, _ in found])
        if self.binder.bind(question.key).chunk == 1:
            actions = actions[:, 0]
        return actions[0] if question.is_single else actions

    def select_action(
        self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Tensor:
        """The next action of every row, (B, D) float32, of an observation as LeRobot makes it.

        See `mmspec.modalities.vla.lerobot`. Actions of a chunk are handed out one by one, and the
        policy is asked when none is left. A state in the observation is that which the action
        before led to. `robots=`, `unnorm_key`, `deadline_ms`, `seed` as for `predict_action`.
        """
        begun, given = perf_counter(), dict(arguments)
        observation = given.pop("observation", None) if not args else args[0]
        if len(args) > 1 or (args and "observation" in arguments):
            raise ValueError("select_action() takes one observation: select_action(observation)")
        seen = lerobot.read(observation)
        numbers = numbers_of(given.pop("robots", None), len(seen.instruction))
        space = self.binder.bind(self.binder.spaces.checked(given.get("unnorm_key"))).space
        if seen.state is not None:
            self._led_to(numbers, space, seen.state)
        with self.robots.told(numbers, lambda: space) as rows:
            is_queued = all(robot.queue for robot in rows)
            for robot in rows:
                if robot.queue and not is_queued:  # the rest of a chunk that nobody carries out
                    robot.predicted = robot.predicted[: -len(robot.queue)]
        if not is_queued:
            asked = {**given, "image": seen.image, "instruction": seen.instruction}
            question = self.question((), {**asked, "robots": numbers})
            found = self._answers(question, loop, begun)
            self._report(question, found, loop)
        with self.robots.told(numbers, lambda: space) as rows:
            if not is_queued:
                for robot, (actions, _) in zip(rows, found, strict=True):
                    robot.queue = list(actions)
            taken = [robot.queue.pop(0) for robot in rows]
        if is_queued and self.last is not None:
            loop.report(self.last)
        return torch.from_numpy(np.stack(taken)).float()

    def rollout(
        self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Rollout | list[Rollout]:
        """An episode in closed loop, from a reset of the robot to the end that the world says.

        Takes `environment`, a `gymnasium.Env` (see `mmspec.modalities.vla.rollout`) or the name of
        one of `mmspec.modalities.vla.worlds`; `instruction` (the world's own if not said), `steps`
        at most, `seed` of the world and of the noise (`episode=` another one of the world), and
        what `predict_action` takes beside. A list of worlds is acted in side by side, a robot in
        each: as many episodes come out, numbered from `episode` on. A step's latency is then that
        of the batch it was in.
        """
        given = {**dict(zip(("environment",), args, strict=False)), **arguments}
        world = given.pop("environment", None)
        if world is None or len(args) > 1:
            raise ValueError("rollout() takes the world by place or as environment=; give one")
        is_single = not isinstance(world, list | tuple)
        worlds = [world] if is_single else check_worlds(world)
        own = {name: given.pop(name, None) for name in ("instruction", "steps")}
        episode = given.pop("episode", None)
        episode = given.get("seed") if episode is None else episode
        numbers = numbers_of(given.pop("robots", None), len(worlds))
        self._check_asked(given)
        self.reset(numbers)

        def act(places: Sequence[int], seen: Sequence[Asked]) -> list[Answered]:
            begun = perf_counter()
            told = tuple(list(one) for one in zip(*seen, strict=True))
            question = self.question(told, {**given, "robots": [numbers[at] for at in places]})
            return self._answers(question, loop, begun)

        def teller(number: int) -> Tell:
            return lambda action, state: self.observe(
                action[None], None if state is None else [state], robots=[number]
            )

        walks = []
        for at, one in enumerate(worlds):
            begun_by = None if episode is None else episode + at
            made = make_world(one) if isinstance(one, str) else one
            walks.append(walk(made, teller(numbers[at]), begun_by, **own))
        found = side_by_side(walks, act)
        steps = [step for one in found for step in one.steps]
        limit = self._limit(given.get("deadline_ms"))
        asked = max(len(one.steps) for one in found)
        self.last = summed_up(loop.stats(), steps, asked, found[0].steps, limit)
        loop.report(self.last)
        told = [replace(one, stats=self.last) for one in found]
        return told[0] if is_single else told

    def observe(self, action: Any, state: Any = None, robots: Any = None) -> None:
        """Tell what a robot did: an action (D,) in its units, and the state (n,) that it led to.

        (B, D) and (B, n) for several `robots` (0, 1, ... if not said). Also without a question
        before: episodes can be replayed from a log. States are given with every action, or never.

        Raises ValueError for other shapes and for NaN, and for a robot of which is not known whose
        action statistics count; then nothing is noted of any robot.
        """
        numbers = numbers_of(robots, 1 if np.ndim(action) < 2 else len(action))
        with self.robots.told(numbers, self._space_unasked) as rows:
            done = rows_of("action", action, len(rows), rows[0].episode.space.size)
            led = None if state is None else rows_of("state", state, len(rows), None)
            for row, robot in enumerate(rows):
                robot.check(None if led is None else led[row])
            for row, robot in enumerate(rows):
                values = robot.episode.space.normalise(done[row])
                robot.observe(values, None if led is None else led[row])

    def reset(self, robots: Any = None, success: bool | Sequence[bool] | None = None) -> None:
        """Begin new episodes, of all robots or of those; `success` says how the old ones ended."""
        ends = list(success) if isinstance(success, Sequence | np.ndarray) else [success]
        if not all(one is None or isinstance(one, bool | np.bool_) for one in ends):
            raise ValueError(f"success={described(success)} is neither True nor False; say which")
        self.robots.reset(None if robots is None else numbers_of(robots, None), ends)

    def steps(self, robot: int = 0) -> tuple[ActionStep, ...]:
        """What every question since the robot's reset took; the last 4096 of them."""
        return self.robots.steps(robot)

    def _check_asked(self, given: Mapping[str, Any]) -> None:
        """Refuse what a rollout cannot hand on, before the world is made."""
        known = tuple(one for one in ASKED if one not in ("image", "instruction", "robots"))
        unknown = sorted(set(given) - set(known))
        if unknown:
            known = ("environment", "instruction", "steps", "episode", "robots", *known)
            raise ValueError(unknown_message(unknown, known, "rollout()"))

    def question(self, args: Sequence[Any], arguments: Mapping[str, Any]) -> ActionQuestion:
        """What `predict_action` is asked, in tensors. Raises ValueError for what cannot be."""
        key = self.binder.spaces.checked(arguments.get("unnorm_key"))
        policy = self.binder.bind(key)
        is_read = arguments.get("image") is not None or bool(args)
        words = self._words() if is_read else None
        allowed = ActionsOnly(policy.space.codes)
        question = prepare(words, self.text.inputs, allowed, args, arguments)
        family, inputs = self.bound.backbone.family, question.inputs
        self.text.check(inputs)
        inputs = inputs if is_read else ended(self.model.config, inputs)
        if family.completed is not None:
            inputs = family.completed(self.model, inputs)
        check_request(self.model, family, inputs)
        return replace(question, key=key, inputs=inputs)

    def _answers(self, question: ActionQuestion, loop: Loop, begun: float) -> Answers:
        policy = self.binder.bind(question.key)
        deadline = Deadline(begun, self._limit(question.deadline_ms), self.pace)
        with self.robots.asked(question.robots, policy.space) as rows:
            return answer(policy, question, rows, loop, deadline)

    def _report(self, question: ActionQuestion, found: Answers, loop: Loop) -> None:
        steps, limit = [step for _, step in found], self._limit(question.deadline_ms)
        before = self.steps(question.robots[0])
        self.last = summed_up(loop.stats(), steps, 1, before, limit)
        loop.report(self.last)

    def _limit(self, deadline_ms: float | None) -> float | None:
        return self.deadline_ms if deadline_ms is None else deadline_ms

    def _space_unasked(self) -> ActionSpace:
        """Of a robot that is told something before it is asked."""
        try:
            return self.binder.bind(self.binder.spaces.checked(None)).space
        except ValueError as error:
            raise ValueError(f"{error}, to accelerate(), or ask the robot first") from error

    def _led_to(self, numbers: Sequence[int], space: Any, states: Any) -> None:
        """What the actions before led to, of robots that had one."""
        led = rows_of("observation.state", states, len(numbers), None)
        with self.robots.told(numbers, lambda: space) as rows:
            for robot, state in zip(rows, led, strict=True):
                if robot.predicted:
                    robot.check(state)
                    robot.observe(robot.predicted[0], state)

    def _words(self) -> PromptReader:
        """The processor that was given, or the one beside the weights, read when it is needed."""
        if self.processor is None:
            if self.name is None:
                raise ValueError(
                    "pictures and words need the policy's processor; give it once, as "
                    "accelerate(model, processor=...), or give the tensors that it makes"
                )
            read: Any = AutoProcessor.from_pretrained
            with reading(self.name, "processor"):
                self.processor = read(self.name, trust_remote_code=False)
        return PromptReader(self.model, self.processor)


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> PolicySession:
    """A policy bound to a recipe. Raises ValueError for parts that do not fit."""
    given = {name: parts.get(name) for name in OWN}
    check_deadline(given["deadline_ms"])
    if given["processor"] is not None and not callable(given["processor"]):
        raise ValueError(
            f"processor={given['processor']!r} cannot read pictures and words; give the policy's "
            "own processor"
        )
    spaces, recipe = (
        ActionSpaces(model, given["actions"], given["unnorm_key"]),
        _stored(recipe, model),
    )
    own = {name: value for name, value in parts.items() if name not in OWN}
    binder = PolicyBinder(reader(model), recipe, drafter, own, spaces)
    return PolicySession(binder, given["processor"], given["deadline_ms"])


def _stored(recipe: Recipe, model: Any) -> Recipe:
    """With the trajectories beside the zoo's own drafter, where it takes some and nobody says."""
    if recipe.takes_drafter or recipe.options.get("store", "") is not None:
        return recipe
    name = str(vars(model.config).get("_name_or_path") or "")
    own = [one for one in MODALITY.zoo if one.drafter and str(zoo.path(one.name)) == name]
    found = [zoo.path(one.drafter) for one in own if one.drafter]
    return replace(recipe, options={**recipe.options, "store": found[0]}) if found else recipe


def load(source: str | Path, **options: Any) -> Any:
    """A policy from a folder, a hub name, or "zoo:NAME"."""
    name = str(source)
    if name.startswith(ZOO):
        return zoo.load(name.removeprefix(ZOO))
    return load_causal(name, **options)
