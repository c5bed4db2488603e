"""What `mmspec.accelerate` returns for robot policies."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from mmspec.accelerated import Accelerated
from mmspec.modalities.vla.step_stats import ActionStep


class AcceleratedPolicy(Accelerated):
    """A vision-language-action policy and the robots that it controls.

    Robots are numbered; a single one is robot 0. By default a predicted action counts as executed
    at the next prediction. Once `observe` has been called in an episode, only the actions given to
    it count.
    """

    calls: ClassVar[tuple[str, ...]] = (
        *("predict_action", "select_action", "rollout", "generate", "__call__"),
    )

    def predict_action(self, *args: Any, **arguments: Any) -> np.ndarray:
        """Predict the next action of one robot, or of several.

        Args:
            image, instruction: The camera image (PIL, or (H, W, 3) uint8; a list of several
                cameras) and the text, also as the two positional arguments; lists of both for
                several robots. Or the tensors of the policy's processor.
            robots: Numbers of the robots, one per row. Default: 0, 1, ...
            unnorm_key: The data set whose action statistics are used.
            deadline_ms: Time limit of this prediction in milliseconds, preprocessing included.
            evaluate: True to compare with the target's own action, outside the measured time.
            do_sample, temperature, top_k, top_p, min_p: Greedy by default.
            seed, row_ids, on_round: See `mmspec.Accelerated`.

        Returns:
            float64 array (D,), or (chunk, D) of a policy that predicts chunks; (B, D) or
            (B, chunk, D) for several robots, in the robot's units.

        Raises:
            ValueError: An unknown data set, images and instructions of different number, an
                argument that is not known.

        Example:
            >>> fast = mmspec.accelerate("openvla/openvla-7b", recipe="hold-last")
            >>> action = fast.predict_action(image, "pick up the cup", unnorm_key="bridge_orig")
        """
        return self._run("predict_action", args, arguments)  # type: ignore[no-any-return]

    def select_action(self, *args: Any, **arguments: Any) -> Tensor:
        """Return the next action of an observation in LeRobot's format.

        Args:
            observation: A dictionary as LeRobot makes it (`mmspec.modalities.vla.lerobot`). A
                state in it is the one that the previous action led to.
            robots, unnorm_key, deadline_ms, seed: As for `predict_action`.

        Returns:
            float32 tensor (B, D). Actions of a chunk are returned one by one; the policy runs again
            when none is left.

        Raises:
            ValueError: An observation without image or instruction.
        """
        return self._run("select_action", args, arguments)  # type: ignore[no-any-return]

    def rollout(self, *args: Any, **arguments: Any) -> Any:
        """Run one episode in closed loop, or several side by side in one batch.

        Args:
            environment: A `gymnasium.Env` whose observation has "image", or the name of one of
                `mmspec.modalities.vla.worlds`; a list of them for several episodes.
            instruction: Default: that of the environment.
            steps: Maximum number of actions.
            seed, episode: Seed of the noise and of the environment; `episode` selects another seed
                for the environment.
            arguments: As for `predict_action`.

        Returns:
            `mmspec.modalities.vla.rollout.Rollout` or a list of them: `images`, `actions` (T, D),
            `is_success`, `stats`.

        Raises:
            ValueError: No environment, or an argument that a rollout does not take.
        """
        return self._run("rollout", args, arguments)

    def generate(self, *args: Any, **inputs: Any) -> Any:
        """Generate action tokens, as `model.generate` does; see `AcceleratedLanguageModel`."""
        return self._run("generate", args, inputs)

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """The `custom_generate` hook of transformers: `model.generate(custom_generate=fast)`."""
        return self._run("__call__", args, arguments)

    def observe(self, action: Any, state: Any = None, robots: Any = None) -> None:
        """Report what a robot did.

        Args:
            action: The executed action (D,) in the robot's units, (B, D) for several robots.
            state: The state (n,) or (B, n) that it led to; with every action of an episode, or
                with none.
            robots: Numbers of the robots. Default: 0, 1, ...

        Raises:
            ValueError: Another shape, NaN, or a robot whose action statistics are not known; then
                nothing is recorded of any robot.
        """
        self.session.observe(action, state, robots)

    def reset(self, robots: Any = None, success: Any = None) -> None:
        """Begin a new episode of all robots, or of `robots`; `success` of the previous one."""
        self.session.reset(robots, success)

    def steps(self, robot: int = 0) -> tuple[ActionStep, ...]:
        """Statistics of every prediction since the robot's reset; the last 4096 of them."""
        return self.session.steps(robot)  # type: ignore[no-any-return]
