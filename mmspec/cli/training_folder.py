"""The folder of a training: its files, and what may be resumed in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from mmspec.cli.output import print_error
from mmspec.cli.training_plan import TrainOptions
from mmspec.models.compatibility import is_same_target
from mmspec.models.folder import read_json
from mmspec.training import checkpoints
from mmspec.training.responses import read_responses

PLAN = "training.json"
UNFINISHED = ".mmspec-"  # of a head that is being written
FIXED = (  # options that a resumed run may not change
    *("answers", "steps", "batch", "accumulate", "pack", "ema", "bf16", "held_out", "every"),
    *("muon", "max_new_tokens", "max_length", "temperature", "seed"),
)
VALUED = ("dtype", "attn", "quantize")  # options of the target that change its states


@dataclass(frozen=True)
class TrainingFolder:
    """The files of a training."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / PLAN

    @property
    def answers(self) -> Path:
        return self.path / "answers.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def episodes(self) -> Path:
        """A folder of data that the target made."""
        return self.path / "played"

    @property
    def downloads(self) -> Path:
        """A folder of images from the network."""
        return self.path / "downloads"

    @property
    def logs(self) -> Path:
        """A folder of trackers."""
        return self.path / "logs"

    @property
    def is_begun(self) -> bool:
        return self.plan.is_file()

    def check(self) -> None:
        """Refuse a folder that holds anything but a training. Raises ValueError."""
        path = self.path
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; give --out a folder")
        own = (self.episodes, self.downloads)
        others = [one for one in path.iterdir() if one not in own] if path.exists() else []
        if others and not self.is_begun:
            raise ValueError(
                f"{path} holds something else than a training; give --out a new folder"
            )

    def begin(
        self, options: TrainOptions, recipe: str, rate: float, data: str, target: Any
    ) -> None:
        """Write the options, or check that those of the run to resume are the same.

        `data` is the digest of the data, `target` the fingerprint of the target. Raises ValueError
        for other ones.
        """
        plan = {
            "recipe": recipe,
            "head": None if options.head is None else str(options.head),
            "rate": rate,
            **{name: value for name, value in asdict(options).items() if name in FIXED},
            "set": list(options.overrides),
            "data": data,
            "placed": {one: options.placed[one] for one in VALUED if one in options.placed} or None,
        }
        if self.is_begun:
            self._check_same(options, plan, target)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"target": options.target, "fingerprint": target, "plan": plan, "history": []}
        checkpoints.write_text(self.plan, json.dumps(content, indent=1))

    def _check_same(self, options: TrainOptions, plan: Mapping[str, Any], target: Any) -> None:
        there = read_json(self.plan)
        theirs = there["fingerprint"]
        if target is not None and theirs is not None and not is_same_target(target, theirs):
            raise ValueError(
                f"{self.path} was begun with another target ({there['target']}), and "
                f"{options.target} is another; give that one, or another --out"
            )
        other = [name for name in plan if there["plan"].get(name) != plan[name]]
        if other:
            was, now = there["plan"].get(other[0]), plan[other[0]]
            raise ValueError(
                f"{self.path} was begun with {other[0]}={was}, not {now}; give the same to "
                "resume, or another --out"
            )

    def write_bad_rows(self, rows: Sequence[Mapping[str, str]]) -> None:
        """List the rows of the data that were left out, if any."""
        if rows:
            text = "".join(json.dumps(one) + "\n" for one in rows)
            checkpoints.write_text(self.path / "bad_rows.jsonl", text)

    def report_missing_answers(self, questions: int) -> None:
        """Report answers that a checkpoint was trained on and that their file has lost."""
        if not self.checkpoint.is_file():
            return
        lost = questions - len(read_responses(self.answers))
        if lost:
            print_error(
                f"{self.answers} has lost {lost} of {questions} answers that the checkpoint beside "
                "it was trained on; they are generated again"
            )

    def save(self, head: Any, history: Sequence[Mapping[str, Any]]) -> None:
        """Write the head, all or nothing. Raises OSError."""
        for unfinished in self.path.glob(f"{UNFINISHED}*"):
            rmtree(unfinished)
        try:
            with TemporaryDirectory(prefix=UNFINISHED, dir=self.path) as scratch:
                head.save_pretrained(scratch)
                for file in sorted(Path(scratch).iterdir()):
                    file.replace(self.path / file.name)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"the head cannot be written to {self.path} ({error}); free some space on its disk "
                "and repeat the command: its checkpoint holds the trained weights"
            ) from error
        text = json.dumps({**read_json(self.plan), "history": list(history)}, indent=1)
        checkpoints.write_text(self.plan, text)
