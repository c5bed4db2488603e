"""`mmspec doctor` for pipelines and their draft networks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers

from mmspec.drafters.denoising.small_denoiser import pipeline_with_network
from mmspec.modalities.common import doctor
from mmspec.modalities.diffusion.network import Network, check_scheduler
from mmspec.modalities.diffusion.plug import session
from mmspec.modality import Finding
from mmspec.models.folder import read_json

INDEX = "model_index.json"
LIBRARIES = ("diffusers", "transformers")  # allowed class sources; code of a folder is not run


def examine(target: str, drafter: str | None) -> list[Finding]:
    """All findings on a pipeline, or on a pipeline and its draft network."""
    if not Path(target).is_dir():
        return [Finding("weights", "not local", None, "note", "only local folders are examined")]
    found: list[Finding] = []
    try:
        parts = networks(Path(target))
        small = None if drafter is None else _draft(Path(drafter))
    except ValueError as error:
        return [Finding("configuration", None, None, "refused", str(error))]
    for name, module in parts.items():
        folder = str(Path(target) / name)
        found.append(
            doctor.check_models(name, [(folder, module)], lambda one: doctor.check_weights(*one))
        )
    if small is not None and drafter is not None:
        found += _weights_of_draft(Path(drafter), small)
    if doctor.is_refused(found):
        return found
    pipe = diffusers.DiffusionPipeline.from_pretrained(target, trust_remote_code=False, **parts)
    found = [Finding("pipeline", type(pipe).__name__), *found, _scheduler(pipe)]
    draft_pipe = None if small is None else _pipeline(pipe, Path(str(drafter)), small)
    if draft_pipe is not None:
        found += _pair(pipe, draft_pipe)
    if doctor.is_refused(found):
        return found
    return [*found, *doctor.find_fitting_recipes(session, pipe, draft_pipe)]


def networks(folder: Path) -> dict[str, Any]:
    """The networks of a pipeline on the meta device.

    Raises ValueError for damaged folders, and for pipelines with custom code.
    """
    entries = read_json(folder / INDEX)
    if not isinstance(entries.get("_class_name"), str):
        raise ValueError(f"{folder / INDEX} requires custom code, which is not run")
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        if not isinstance(entry, list) or entry[0] is None:
            continue
        if not (folder / name).is_dir():
            raise ValueError(f"{folder} has no folder {name}, which {INDEX} lists")
        module = _network(folder / name, *entry)
        if module is not None:
            found[name] = module
    return found


def _network(folder: Path, library: str, kind: str) -> Any:
    """A component with weights; None for schedulers, tokenizers and others."""
    if library not in LIBRARIES:
        raise ValueError(f"{folder} needs {library}.{kind}, whose code is not run")
    home = import_module(library)
    maker: Any = getattr(home, kind) if kind in dir(home) else None
    bases = {base.__name__ for base in inspect.getmro(maker)} if inspect.isclass(maker) else set()
    if "ModelMixin" in bases:
        return doctor.skeleton(lambda: maker.from_config(maker.load_config(str(folder))))
    if "PreTrainedModel" in bases:
        config = maker.config_class.from_pretrained(folder)
        return doctor.skeleton(lambda: maker(config))
    return None


def _draft(folder: Path) -> Mapping[str, Any]:
    """The networks of a draft pipeline, or a single denoiser under the empty name."""
    if (folder / INDEX).is_file():
        return networks(folder)
    kind = read_json(folder / "config.json").get("_class_name")
    if not isinstance(kind, str):
        raise ValueError(f"{folder} must be a pipeline or a denoiser of diffusers")
    return {"": _network(folder, "diffusers", kind)}


def _weights_of_draft(folder: Path, small: Mapping[str, Any]) -> Iterator[Finding]:
    for name, module in small.items():
        one = doctor.check_models(
            f"drafter {name}".strip(),
            [(str(folder / name), module)],
            lambda pair: doctor.check_weights(*pair),
        )
        yield Finding(one.check, None, one.target, one.verdict, one.remark)


def _pipeline(pipe: Any, folder: Path, small: Mapping[str, Any]) -> Any:
    """The draft pipeline, built as by `load_draft`."""
    if "" in small:
        return pipeline_with_network(Network(pipe), small[""])
    return diffusers.DiffusionPipeline.from_pretrained(
        str(folder), trust_remote_code=False, **small
    )


def _scheduler(pipe: Any) -> Finding:
    """Whether the scheduler has the stochastic steps that exact recipes need."""
    name = type(pipe.scheduler).__name__
    try:
        check_scheduler(pipe.scheduler)
    except ValueError as error:
        return Finding("scheduler", name, None, "note", str(error))
    return Finding("scheduler", name)


def _pair(pipe: Any, draft_pipe: Any) -> Iterator[Finding]:
    """Check that target and draft network take states of the same shape."""
    ours, theirs = (Network(one).module.config for one in (pipe, draft_pipe))
    for name in ("in_channels", "sample_size"):
        mine, other = ours.get(name), theirs.get(name)
        remark = "the draft pipeline's latents have another shape; give one of the target's size"
        yield Finding(name, mine, other, *(() if mine == other else ("refused", remark)))
