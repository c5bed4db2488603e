"""Compare a real vLLM with this package: the same exported target and head, the same requests.

    python -m tools.vllm_proof --python ENVIRONMENT/bin/python [CASE ...]

prints one table per case: acceptance per position there and here, and how many outputs are equal.
`tools/vllm_env.sh` makes the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import mmspec
from mmspec import cli, formats, zoo
from mmspec.formats.targets import export_target
from mmspec.models.heads.dflash import DFlashHead
from mmspec.models.heads.eagle3 import Eagle3Head, load_eagle3_head
from mmspec.zoo import language
from tools import vllm_engine

ENGINE = Path(vllm_engine.__file__)
LENGTH, MAX_TOKENS, REQUESTS = 5, 96, 16
TEXT, PROMPT = "llava-text-drafter", "<bos>user : describe the picture assistant :"
TRAINING = (  # of a head that is not given: half a minute of one core, twice that for images
    *("--muon", "--rate", "2e-3", "--batch", "16", "--held-out", "16", "--max-new-tokens", "64"),
)
OWN_TRAINING = {
    "eagle-3": (  # the target has one layer, whose output is normed
        *("--steps", "80", "--every", "80", "--set", "intermediate_size=256"),
        *("--set", "num_taps=1", "--set", "tapped_layers=[0]"),
    ),
    "dflash": (  # blocks of the newest token and `LENGTH` masks, as vLLM reads them
        *("--steps", "120", "--every", "120", "--set", "num_hidden_layers=2"),
        *("--set", f"block_size={LENGTH + 1}"),
    ),
}
FORMATS = {"eagle-3": ("vllm", "eagle3"), "dflash": ("dflash", "dflash")}  # and vLLM's method


@dataclass(frozen=True)
class Case:
    """A target of the zoo and its head, of the zoo or a folder; None = one is trained first."""

    target: str
    recipe: str = "eagle-3"
    head: str | None = None
    positions: str = "keep"
    has_cut_vocabulary: bool = False
    is_mended: bool = False  # see `vllm_engine.Job`

    @property
    def reads_images(self) -> bool:
        return self.target != TEXT


_QWEN = Case("qwen2.5-vl", head="qwen2.5-vl-eagle3", positions="mrope")
_DFLASH = Case("llava", recipe="dflash")
CASES = {
    "text": Case(TEXT, has_cut_vocabulary=True),
    "llava": Case("llava", head="llava-eagle3"),
    "qwen2.5-vl": _QWEN,
    "qwen2.5-vl, slots mended": replace(_QWEN, is_mended=True),
    "llava, dflash": _DFLASH,
    "llava, dflash, keys mended": replace(_DFLASH, is_mended=True),
}


@dataclass(frozen=True)
class Report:
    """What both made of the same requests; lists of counts have an entry per drafted position."""

    version: str
    requests: int
    identical: int  # requests with the same tokens in vLLM, speculating and not
    identical_batch: int  # the same, all requests in one batch
    identical_here: int  # with those of this package
    drafts: tuple[int, int]  # there, here
    accepted_there: list[int]  # vLLM's counters, past the end of a text
    accepted_here: list[int]
    compared: int  # drafts that are not the last of their request
    compared_there: list[int]
    compared_here: list[int]
    same_drafts: int  # of the compared: as many tokens accepted there as here

    def shares(self) -> list[tuple[float, float]]:
        """Acceptance there and here, per position, of the compared drafts."""
        both = zip(self.compared_there, self.compared_here, strict=True)
        return [(there / self.compared, here / self.compared) for there, here in both]


@dataclass(frozen=True)
class Run:
    """A case that was exported, and what this package made of its requests."""

    job: vllm_engine.Job
    outputs: list[Any]


def prove(
    cases: Sequence[Case], python: Path, folder: Path, requests: int = REQUESTS
) -> list[Report]:
    """Export targets and heads, run both programs, and compare them.

    The bundled heads read image features and slot indices when they were trained; here they are
    read as in engines, which costs acceptance on both sides.
    """
    runs = [_prepare(case, folder / str(at), requests) for at, case in enumerate(cases)]
    both: list[vllm_engine.Job] = []
    for run in runs:
        both += [run.job, {**run.job, "head": None}]
    found = run_engine(both, python, folder)
    pairs = zip(runs, found[::2], found[1::2], strict=True)
    return [compare(run.outputs, there, plain) for run, there, plain in pairs]


def run_engine(
    jobs: Sequence[vllm_engine.Job], python: Path, folder: Path
) -> list[vllm_engine.Result]:
    """Run jobs in vLLM's environment. Raises RuntimeError with the end of what it printed."""
    given, out = folder / "jobs.json", folder / "results.json"
    given.write_text(json.dumps(jobs), encoding="utf-8")
    command = [str(python), str(ENGINE), str(given), str(out)]
    own = {name: one for name, one in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=own, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    found: list[vllm_engine.Result] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _prepare(case: Case, folder: Path, count: int) -> Run:
    folder.mkdir()
    model, served = _export(case, folder)
    requests = _requests(case, folder, count)
    target, drafter = str(folder / "target"), str(folder / "head")
    job = vllm_engine.Job(
        model=target,
        head=drafter,
        length=LENGTH,
        max_tokens=MAX_TOKENS,
        requests=requests,
        method=FORMATS[case.recipe][1],
        is_mended=case.is_mended,
    )
    fast = mmspec.accelerate(model, case.recipe, drafter=served, length=LENGTH)
    return Run(job, [_decode(case, fast, one) for one in requests])


def _export(case: Case, folder: Path) -> tuple[Any, Any]:
    """Write target and head for vLLM; return both, in float32."""
    model, source = zoo.load(case.target).float(), zoo.path(case.target)
    layout, _ = FORMATS[case.recipe]
    if case.head is None:
        trained = _train_head(case, folder)
    else:
        trained = Path(case.head) if Path(case.head).is_dir() else zoo.path(case.head)
    own: Any
    if case.recipe == "eagle-3":
        own = _as_engines_read(case, model, trained)
    else:
        own = DFlashHead.from_pretrained(trained)
        own = own.float()
    export_target("vllm", source, folder / "target")
    formats.export(layout, own, folder / "head")
    return model, load_again(layout, folder / "head")


def _as_engines_read(case: Case, model: Any, trained: Path) -> Eagle3Head:
    own: Any = load_eagle3_head(trained, torch.float32)
    own.config.visual_slots = "placeholder"
    if case.positions == "mrope" and own.config.positions != "mrope":
        own.config.positions = "mrope"
        rope = model.config.get_text_config().rope_parameters
        own.config.rope_parameters |= {"mrope_section": rope["mrope_section"]}
    return _cut_vocabulary(own) if case.has_cut_vocabulary else own


def _train_head(case: Case, folder: Path) -> Path:
    """Train a head on captions; of the text model, on continuations of them."""
    examples = language.examples(160 if case.reads_images else 256, "train", 1, "caption", size=16)
    rows, file, out = [], folder / "rows.jsonl", folder / "trained"
    for at, one in enumerate(examples):
        if case.reads_images:
            one.image.save(folder / f"train-{at}.png")
            rows.append({"prompt": one.prompt, "image": f"train-{at}.png"})
        else:
            rows.append({"prompt": f"assistant : {_begin(one, at)}"})
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = ["--target", f"zoo:{case.target}", "--data", str(file), "--out", str(out)]
    given += ["--cache", str(folder / "cache"), *TRAINING, *OWN_TRAINING[case.recipe]]
    with redirect_stdout(StringIO()):
        code = cli.main(["train", case.recipe, *given, "--json"])
    assert code == 0, "the head could not be trained"
    return out


def _begin(example: language.Example, at: int) -> str:
    """The first words of a caption, more or fewer by its number."""
    return " ".join(example.answer.split()[: 4 + at % 9])


def load_again(layout: str, folder: Path) -> Any:
    """The head as this package reads the exported folder."""
    head: Any = formats.convert(layout, [folder])
    return head.float()


def _cut_vocabulary(head: Eagle3Head) -> Eagle3Head:
    """The head without every ninth token."""
    config = deepcopy(head.config)
    kept = torch.tensor([one for one in range(config.vocab_size) if one % 9 != 8])
    config.draft_vocab_size = len(kept)
    cut = Eagle3Head(config)
    cut.train(False)
    weights = head.state_dict()
    cut.load_state_dict(
        {**weights, "lm_head.weight": weights["lm_head.weight"][kept]}, strict=False
    )
    cut.set_draft_vocabulary(kept)
    return cut


def _requests(case: Case, folder: Path, count: int) -> list[vllm_engine.Request]:
    """Captions of held-out scenes; for the text model beginnings of captions."""
    found: list[vllm_engine.Request] = []
    for at, one in enumerate(language.examples(count, "held-out", 0, "caption")):
        if not case.reads_images:
            found.append({"prompt": f"{PROMPT} {_begin(one, at)}", "image": None})
            continue
        file = folder / f"{at}.png"
        one.image.save(file)
        text = language.format_prompt(zoo.processor(case.target), one.prompt)
        found.append({"prompt": text, "image": str(file)})
    return found


def _decode(case: Case, fast: Any, request: vllm_engine.Request) -> Any:
    """Output of this package for one request, and its prompt."""
    processor = zoo.processor(case.target)
    text = request["prompt"]
    if request["image"] is None:
        inputs = processor(text, return_tensors="pt", return_token_type_ids=False)
    else:
        image = Image.open(request["image"]).convert("RGB")
        inputs = processor(images=image, text=text, return_tensors="pt")
    out = fast.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
    prompt = inputs["input_ids"][0].tolist()
    return prompt, out.sequences[0, len(prompt) :].tolist(), out.stats.per_step_accepted


def compare(here: Sequence[Any], there: vllm_engine.Result, plain: vllm_engine.Result) -> Report:
    """Count equal outputs and accepted tokens."""
    rows, others = there["rows"], plain["rows"]
    for (prompt, _, _), row in zip(here, rows, strict=True):
        assert prompt == row["prompt"], f"another prompt: {prompt} here, {row['prompt']} there"
    own = [accepted for _, _, accepted in here]
    engine = [[new - 1 for new in row["steps"][1:]] for row in rows]
    pairs = [
        both for a, b in zip(engine, own, strict=True) for both in zip(a[:-1], b[:-1], strict=False)
    ]
    tokens = [row["tokens"] for row in rows]
    return Report(
        version=there["version"],
        requests=len(rows),
        identical=sum(a == b["tokens"] for a, b in zip(tokens, others, strict=True)),
        identical_batch=sum(a == b for a, b in zip(there["batch"], plain["batch"], strict=True)),
        identical_here=sum(a == b for a, (_, b, _) in zip(tokens, here, strict=True)),
        drafts=(there["drafts"], sum(map(len, own))),
        accepted_there=there["accepted_per_position"],
        accepted_here=_count([one for row in own for one in row]),
        compared=len(pairs),
        compared_there=_count([a for a, _ in pairs]),
        compared_here=_count([b for _, b in pairs]),
        same_drafts=sum(a == b for a, b in pairs),
    )


def _count(accepted: Sequence[int]) -> list[int]:
    """Drafts that accepted more than i tokens, for each position i."""
    return [sum(one > at for one in accepted) for at in range(LENGTH)]


def main() -> None:
    """Run the cases and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--python", type=Path, required=True, help="that of vLLM's environment")
    parser.add_argument(
        "--head", action="append", default=[], metavar="TARGET=DIR", help="another head of a target"
    )
    parser.add_argument("--requests", type=int, default=REQUESTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    names, heads = given.cases or list(CASES), dict(one.split("=", 1) for one in given.head)
    with tempfile.TemporaryDirectory() as folder:
        cases = [CASES[name] for name in names]
        cases = [
            replace(one, head=heads.get(one.target, one.head)) if one.head else one for one in cases
        ]
        reports = prove(cases, given.python, Path(folder), given.requests)
    for name, report in zip(names, reports, strict=True):
        _print(name, report)


def _print(name: str, found: Report) -> None:
    print(f"\n{name}: vLLM {found.version}, {found.requests} requests, drafts {found.drafts}")
    print(f"identical to vLLM without speculation: {found.identical} of {found.requests}")
    print(
        f"the same in one batch: {found.identical_batch}; to this package: {found.identical_here}"
    )
    print(f"accepted per position, there {found.accepted_there}, here {found.accepted_here}")
    print(f"the same number accepted: {found.same_drafts} of {found.compared} compared drafts")
    print("| position | vLLM | mmspec |\n|---|---|---|")
    for at, (there, here) in enumerate(found.shares(), 1):
        print(f"| {at} | {there:.3f} | {here:.3f} |")


if __name__ == "__main__":
    main()
