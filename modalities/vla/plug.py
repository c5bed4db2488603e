"""Robot policies bound to a recipe: `predict_action`, and calls of a control loop."""

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
from mmspec.codes.episodes import Episode
from mmspec.codes.trajectories import FILE
from mmspec.errors import check_number, explain_load_errors, format_value, unknown_message
from mmspec.modalities.common import tokens
from mmspec.modalities.common.families import make_reader
from mmspec.modalities.common.text_generation import TextGenerator
from mmspec.modalities.vla import MODALITY, lerobot
from mmspec.modalities.vla.accelerated import AcceleratedPolicy
from mmspec.modalities.vla.inputs import PromptReader, append_empty_token
from mmspec.modalities.vla.prediction import (
    ActionsOnly,
    BoundPolicy,
    Deadline,
    RoundTimes,
    fresh_episodes,
    predict_actions,
)
from mmspec.modalities.vla.requests import OWN as REQUEST
from mmspec.modalities.vla.requests import ActionRequest, check_deadline, prepare_request
from mmspec.modalities.vla.robots import Robots, count_rows, parse_robots, parse_rows
from mmspec.modalities.vla.rollout import (
    OnAction,
    PolicyRequest,
    PolicyResponse,
    Rollout,
    check_worlds,
    run_episode,
    run_in_parallel,
)
from mmspec.modalities.vla.spaces import ActionSpaces, check_drafter, check_image_ids, chunk_size
from mmspec.modalities.vla.step_stats import ActionStats, ActionStep, summarize_steps
from mmspec.modalities.vla.worlds import make_world
from mmspec.modality import Loop
from mmspec.recipe import Recipe
from mmspec.targets.readers.visual import check_request

OWN = ("processor", "actions", "unnorm_key", "deadline_ms")
PLAIN = "plain"
Predictions = list[tuple[np.ndarray, ActionStep]]


@dataclass
class PolicyBinder:
    """Binds a recipe to a policy, once for each data set whose action statistics are used."""

    backbone: Any
    recipe: Recipe
    drafter: Any
    parts: Mapping[str, Any]
    spaces: ActionSpaces
    policies: dict[str | None, BoundPolicy] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def bind(self, key: str | None) -> BoundPolicy:
        """Raises ValueError for parts that do not fit, and for a name that is not known."""
        with self.lock:
            if key not in self.policies:
                self.policies[key] = self._bind(self.spaces.space(key))
            return self.policies[key]

    def bind_default(self) -> BoundPolicy:
        """Bind the default statistics: of several data sets the first."""
        return self.bind(self.spaces.default)

    def _bind(self, space: Any) -> BoundPolicy:
        small = self.drafter
        for other in self.policies.values():  # load from its folder only once
            small = small if other.bound.draft_model is None else other.bound.draft_model.model
        check_drafter(small, space.codes)
        check_image_ids(space.codes, self.backbone)
        parts = {**self.parts, "actions": space}
        bound = tokens.bind(self.backbone, self.recipe, small, parts)
        if bound.draft_model is not None:
            check_drafter(bound.draft_model.model, space.codes)
        own = {"check": self.parts.get("check", True)}
        plain = tokens.bind(self.backbone, recipes.get(PLAIN), None, own)
        return BoundPolicy(bound, plain, space, chunk_size(bound.model.config))


class PolicySession(tokens.TokenSession):
    """A policy bound to a recipe, and the robots that it controls; see `AcceleratedPolicy`."""

    interface = AcceleratedPolicy

    def __init__(self, binder: PolicyBinder, processor: Any, deadline_ms: float | None) -> None:
        first = binder.bind_default()
        super().__init__(first.bound)
        self.binder, self.processor, self.deadline_ms = binder, processor, deadline_ms
        self.text = TextGenerator(first.bound, make_shared=partial(fresh_episodes, first.space))
        self.signature = self.text.signature
        self.robots, self.round_times = Robots(), RoundTimes()
        self.last: ActionStats | None = None

    def save(self, folder: Path) -> None:
        """Save the draft model, and the trajectory store of the recipe, if it uses one."""
        super().save(folder)
        model = self.bound.draft_model
        if model is not None and self.recipe.options.get("store", "") is None:
            stored = Path(model.model.config._name_or_path) / FILE
            if stored.is_file():
                copyfile(stored, folder / FILE)

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        """`generate` as of the model itself; others as the methods of the same name."""
        if call == "generate":
            return self.text.generate(args, arguments, loop)
        if call == "__call__":
            return self.text.hook(args, arguments, loop)
        if call == "predict_action":
            return self.predict_action(args, arguments, loop)
        method = self.select_action if call == "select_action" else self.rollout
        return method(args, arguments, loop)

    def predict_action(
        self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> np.ndarray:
        """The next action (D,), or (chunk, D) of a policy that predicts chunks; float64.

        A leading batch dimension for lists of images and instructions. Arguments as of
        `AcceleratedPolicy`.
        """
        start = perf_counter()
        request = self.prepare_request(args, arguments)
        found = self._predict(request, loop, start)
        self._report(request, found, loop)
        actions = np.stack([action for action, _ in found])
        if self.binder.bind(request.key).chunk == 1:
            actions = actions[:, 0]
        return actions[0] if request.is_single else actions

    def select_action(
        self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Tensor:
        """The next action of each row, (B, D) float32, for an observation in LeRobot's format.

        See `mmspec.modalities.vla.lerobot`. Actions of a chunk are queued and returned one by one;
        the policy is called when the queue is empty. A state in the observation is the result of
        the previous action. `robots=`, `unnorm_key`, `deadline_ms`, `seed` as of `predict_action`.
        """
        start, given = perf_counter(), dict(arguments)
        observation = given.pop("observation", None) if not args else args[0]
        if len(args) > 1 or (args and "observation" in arguments):
            raise ValueError("select_action() takes one observation: select_action(observation)")
        seen = lerobot.parse_observation(observation)
        numbers = parse_robots(given.pop("robots", None), len(seen.instruction))
        space = self.binder.bind(self.binder.spaces.resolve_key(given.get("unnorm_key"))).space
        if seen.state is not None:
            self._observe_states(numbers, space, seen.state)
        with self.robots.access(numbers, lambda: space) as rows:
            is_queued = all(robot.queue for robot in rows)
            for robot in rows:
                if robot.queue and not is_queued:  # drop the unexecuted rest of a chunk
                    robot.predicted = robot.predicted[: -len(robot.queue)]
        if not is_queued:
            named = {**given, "image": seen.image, "instruction": seen.instruction}
            request = self.prepare_request((), {**named, "robots": numbers})
            found = self._predict(request, loop, start)
            self._report(request, found, loop)
        with self.robots.access(numbers, lambda: space) as rows:
            if not is_queued:
                for robot, (chunk, _) in zip(rows, found, strict=True):
                    robot.queue = list(chunk)
            actions = [robot.queue.pop(0) for robot in rows]
        if is_queued and self.last is not None:
            loop.report(self.last)
        return torch.from_numpy(np.stack(actions)).float()

    def rollout(
        self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Rollout | list[Rollout]:
        """Run an episode in closed loop, from a reset of the robot to the end of the episode.

        Takes `environment`, a `gymnasium.Env` (see `mmspec.modalities.vla.rollout`) or the name of
        one of `mmspec.modalities.vla.worlds`; `instruction` (default: of the environment); `steps`,
        the maximum; `seed` of the environment and the noise (`episode=`: of the environment only);
        and the arguments of `predict_action`. A list of environments is run in parallel, one robot
        in each, with seeds from `episode` on, and returns a list of rollouts; the latency of a
        step is then that of its batch.
        """
        given = {**dict(zip(("environment",), args, strict=False)), **arguments}
        world = given.pop("environment", None)
        if world is None or len(args) > 1:
            raise ValueError(
                "rollout() takes environment=, one or a list; give it as first argument, such as "
                "rollout('table')"
            )
        is_single = not isinstance(world, list | tuple)
        worlds = check_worlds([world] if is_single else world)
        own = {name: given.pop(name, None) for name in ("instruction", "steps")}
        episode = given.pop("episode", None)
        named, episode = ("seed", given.get("seed")) if episode is None else ("episode", episode)
        if episode is not None:
            check_number(named, episode, 0, whole=True, example=0)
        numbers = parse_robots(given.pop("robots", None), len(worlds))
        self._check_arguments(given)
        self.reset(numbers)

        def predict(
            indices: Sequence[int], requests: Sequence[PolicyRequest]
        ) -> list[PolicyResponse]:
            start = perf_counter()
            columns = tuple(list(one) for one in zip(*requests, strict=True))
            active = [numbers[at] for at in indices]
            request = self.prepare_request(columns, {**given, "robots": active})
            return self._predict(request, loop, start)

        def make_callback(number: int) -> OnAction:
            return lambda action, state: self.observe(
                action[None], None if state is None else [state], robots=[number]
            )

        episodes = []
        for at, one in enumerate(worlds):
            seed = None if episode is None else episode + at
            made = make_world(one) if isinstance(one, str) else one
            episodes.append(run_episode(made, make_callback(numbers[at]), seed, **own))
        found = run_in_parallel(episodes, predict)
        steps = [step for one in found for step in one.steps]
        limit = self._limit(given.get("deadline_ms"))
        num_requests = max(len(one.steps) for one in found)
        self.last = summarize_steps(loop.stats(), steps, num_requests, found[0].steps, limit)
        loop.report(self.last)
        key = self.binder.spaces.resolve_key(given.get("unnorm_key"))
        names = tuple(dim.name for dim in self.binder.bind(key).space.dims)
        rollouts = [replace(one, stats=self.last, components=names) for one in found]
        return rollouts[0] if is_single else rollouts

    def observe(self, action: Any, state: Any = None, robots: Any = None) -> None:
        """Record an executed action (D,) in the robot's units, and the resulting state (n,).

        (B, D) and (B, n) for several `robots` (default: 0, 1, ...). A prediction is not required
        first: episodes can be replayed from a log. Give states with every action, or with none.

        Raises ValueError for other shapes, for NaN, and for a robot whose action statistics are
        not known; then nothing is recorded for any robot.
        """
        numbers = parse_robots(robots, count_rows(action))
        with self.robots.access(numbers, self._default_space) as rows:
            actions = parse_rows("action", action, len(rows), rows[0].episode.space.size)
            states = None if state is None else parse_rows("state", state, len(rows), None)
            for row, robot in enumerate(rows):
                robot.check(None if states is None else states[row])
            for row, robot in enumerate(rows):
                values = robot.episode.space.normalise(actions[row])
                robot.observe(values, None if states is None else states[row])

    def reset(self, robots: Any = None, success: bool | Sequence[bool] | None = None) -> None:
        """Start new episodes of all or the given robots; `success` is that of the old ones."""
        ends = list(success) if isinstance(success, Sequence | np.ndarray) else [success]
        if not all(one is None or isinstance(one, bool | np.bool_) for one in ends):
            raise ValueError(f"success={format_value(success)} is neither True nor False; give one")
        self.robots.reset(None if robots is None else parse_robots(robots, None), ends)

    def episodes(self, robots: Sequence[int]) -> list[Episode]:
        """Actions, states and deviations of robots since their reset. Raises ValueError."""
        with self.robots.access(parse_robots(list(robots), None), self._default_space) as rows:
            return [replace(robot.episode) for robot in rows]

    def steps(self, robot: int = 0) -> tuple[ActionStep, ...]:
        """Statistics of each request since the robot's reset, at most the last 4096."""
        return self.robots.steps(*parse_robots([robot], None))

    def _check_arguments(self, given: Mapping[str, Any]) -> None:
        """Raises ValueError for unknown arguments, before an environment is created."""
        known = tuple(one for one in REQUEST if one not in ("image", "instruction", "robots"))
        unknown = sorted(set(given) - set(known))
        if unknown:
            known = ("environment", "instruction", "steps", "episode", "robots", *known)
            raise ValueError(unknown_message(unknown, known, "rollout()"))

    def prepare_request(self, args: Sequence[Any], arguments: Mapping[str, Any]) -> ActionRequest:
        """The tensors and settings of `predict_action`. Raises ValueError for bad arguments."""
        key = self.binder.spaces.resolve_key(arguments.get("unnorm_key"))
        policy = self.binder.bind(key)
        is_read = arguments.get("image") is not None or bool(args)
        reader = self._load_reader() if is_read else None
        allowed = ActionsOnly(policy.space.codes)
        request = prepare_request(reader, self.text.inputs, allowed, args, arguments)
        family, inputs = self.bound.backbone.family, request.inputs
        self.text.check(inputs)
        inputs = inputs if is_read else append_empty_token(self.model.config, inputs)
        if family.add_placeholders is not None:
            inputs = family.add_placeholders(self.model, inputs)
        check_request(self.model, family, inputs)
        return replace(request, key=key, inputs=inputs)

    def _predict(self, request: ActionRequest, loop: Loop, start: float) -> Predictions:
        policy = self.binder.bind(request.key)
        deadline = Deadline(start, self._limit(request.deadline_ms), self.round_times)
        with self.robots.reserve(request.robots, policy.space) as rows:
            return predict_actions(policy, request, rows, loop, deadline)

    def _report(self, request: ActionRequest, found: Predictions, loop: Loop) -> None:
        steps, limit = [step for _, step in found], self._limit(request.deadline_ms)
        before = self.steps(request.robots[0])
        self.last = summarize_steps(loop.stats(), steps, 1, before, limit)
        loop.report(self.last)

    def _limit(self, deadline_ms: float | None) -> float | None:
        return self.deadline_ms if deadline_ms is None else deadline_ms

    def _default_space(self) -> ActionSpace:
        """The action space of a robot that is observed before its first prediction."""
        try:
            return self.binder.bind(self.binder.spaces.resolve_key(None)).space
        except ValueError as error:
            raise ValueError(f"{error}, to accelerate(), or predict an action first") from error

    def _observe_states(self, numbers: Sequence[int], space: Any, states: Any) -> None:
        """Record the states after the previous actions, for robots that had one."""
        parsed = parse_rows("observation.state", states, len(numbers), None)
        with self.robots.access(numbers, lambda: space) as rows:
            for robot, state in zip(rows, parsed, strict=True):
                if robot.predicted:
                    robot.check(state)
                    robot.observe(robot.predicted[0], state)

    def _load_reader(self) -> PromptReader:
        """The given processor, else that of the model's folder, loaded on first use."""
        if self.processor is None:
            if self.name is None:
                raise ValueError(
                    "images and instructions need the policy's processor; give it once, as "
                    "accelerate(model, processor=...), or give the tensors that it returns"
                )
            read: Any = AutoProcessor.from_pretrained
            with explain_load_errors(self.name, "processor"):
                self.processor = read(self.name, trust_remote_code=False)
        return PromptReader(self.model, self.processor)


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> PolicySession:
    """A policy bound to a recipe. Raises ValueError for parts that do not fit."""
    given = {name: parts.get(name) for name in OWN}
    check_deadline(given["deadline_ms"])
    if given["processor"] is not None and not callable(given["processor"]):
        raise ValueError(
            f"processor={given['processor']!r} cannot encode images and text; give the policy's "
            "own processor"
        )
    spaces, recipe = (
        ActionSpaces(model, given["actions"], given["unnorm_key"]),
        _add_default_store(recipe, model),
    )
    own = {name: value for name, value in parts.items() if name not in OWN}
    binder = PolicyBinder(make_reader(model), recipe, drafter, own, spaces)
    return PolicySession(binder, given["processor"], given["deadline_ms"])


def _add_default_store(recipe: Recipe, model: Any) -> Recipe:
    """Add the trajectories of the bundled draft model, if the recipe takes a store and has none."""
    if recipe.takes_drafter or recipe.options.get("store", "") is not None:
        return recipe
    name = str(vars(model.config).get("_name_or_path") or "")
    own = [one for one in MODALITY.zoo if one.drafter and str(zoo.path(one.name)) == name]
    found = [zoo.path(one.drafter) for one in own if one.drafter]
    return replace(recipe, options={**recipe.options, "store": found[0]}) if found else recipe


def load(source: str | Path, **options: Any) -> Any:
    """A policy from a folder, a hub name, or "zoo:NAME"."""
    return tokens.load_token_model(source, **options)
