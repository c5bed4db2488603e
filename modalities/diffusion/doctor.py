"""What `mmspec doctor` says of pipelines and of draft networks for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers

from mmspec.drafters.denoising.small_denoiser import between
from mmspec.modalities.common import doctor
from mmspec.modalities.diffusion.network import Network, check_scheduler
from mmspec.modalities.diffusion.plug import session
from mmspec.modality import Finding
from mmspec.models.folder import configuration

INDEX = "model_index.json"
LIBRARIES = ("diffusers", "transformers")  # whose classes are built; code of a folder is not run


def examine(target: str, drafter: str | None) -> list[Finding]:
    """All findings on a pipeline, or on a pipeline and its draft network."""
    if not Path(target).is_dir():
        return [Finding("weights", "not local", None, "note", "only folders are looked at")]
    found: list[Finding] = []
    try:
        parts = networks(Path(target))
        small = None if drafter is None else _draft(Path(drafter))
    except ValueError as error:
        return [Finding("configuration", None, None, "refused", str(error))]
    for name, module in parts.items():
        folder = str(Path(target) / name)
        found.append(doctor.both(name, [(folder, module)], lambda one: doctor.weights(*one)))
    if small is not None and drafter is not None:
        found += _weights_of_draft(Path(drafter), small)
    if doctor.is_refused(found):
        return found
    pipe = diffusers.DiffusionPipeline.from_pretrained(target, trust_remote_code=False, **parts)
    found = [Finding("pipeline", type(pipe).__name__), *found, _scheduler(pipe)]
    quick = None if small is None else _pipeline(pipe, Path(str(drafter)), small)
    if quick is not None:
        found += _pair(pipe, quick)
    if doctor.is_refused(found):
        return found
    return [*found, *doctor.fitting("latents", session, pipe, quick)]


def networks(folder: Path) -> dict[str, Any]:
    """The networks of a pipeline, without memory for their weights.

    Raises ValueError for what is damaged, and for a pipeline with code of its own.
    """
    entries = configuration(folder / INDEX)
    if not isinstance(entries.get("_class_name"), str):
        raise ValueError(f"{folder / INDEX} names code of its own, which is not run here")
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        if not isinstance(entry, list) or entry[0] is None:
            continue
        if not (folder / name).is_dir():
            raise ValueError(f"{folder} has no folder {name}, which {INDEX} names")
        module = _network(folder / name, *entry)
        if module is not None:
            found[name] = module
    return found


def _network(folder: Path, library: str, kind: str) -> Any:
    """A component that holds weights; None for schedulers, tokenizers and the like."""
    if library not in LIBRARIES:
        raise ValueError(f"{folder} is of {library}.{kind}, which is not run here")
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
    """The networks of a draft pipeline, or a denoiser alone under no name."""
    if (folder / INDEX).is_file():
        return networks(folder)
    kind = configuration(folder / "config.json").get("_class_name")
    if not isinstance(kind, str):
        raise ValueError(
            f"{folder} is neither a pipeline nor a denoiser of diffusers; give one of them"
        )
    return {"": _network(folder, "diffusers", kind)}


def _weights_of_draft(folder: Path, small: Mapping[str, Any]) -> Iterator[Finding]:
    for name, module in small.items():
        one = doctor.both(
            f"drafter {name}".strip(),
            [(str(folder / name), module)],
            lambda pair: doctor.weights(*pair),
        )
        yield Finding(one.check, None, one.target, one.verdict, one.remark)


def _pipeline(pipe: Any, folder: Path, small: Mapping[str, Any]) -> Any:
    """The draft pipeline, as `load_draft` would make it."""
    if "" in small:
        return between(Network(pipe), small[""])
    return diffusers.DiffusionPipeline.from_pretrained(
        str(folder), trust_remote_code=False, **small
    )


def _scheduler(pipe: Any) -> Finding:
    """Whether exact recipes find noise in its steps."""
    name = type(pipe.scheduler).__name__
    try:
        check_scheduler(pipe.scheduler)
    except ValueError as error:
        return Finding("scheduler", name, None, "note", str(error))
    return Finding("scheduler", name)


def _pair(pipe: Any, quick: Any) -> Iterator[Finding]:
    """Two networks of one chain take states of one shape."""
    ours, theirs = (Network(one).module.config for one in (pipe, quick))
    for name in ("in_channels", "sample_size"):
        mine, other = ours.get(name), theirs.get(name)
        remark = "the draft pipeline's latents have another shape; give one of the target's size"
        yield Finding(name, mine, other, *(() if mine == other else ("refused", remark)))
