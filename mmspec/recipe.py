"""A recipe names a paper's five parts; binding it to a model checks that they fit together."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from mmspec.draft import Drafter, Gate, Kind, Verifier
from mmspec.errors import with_article

if TYPE_CHECKING:
    from mmspec.codes.actions import ActionSpace

Part = TypeVar("Part")
Made = TypeVar("Made", covariant=True)


class Execution(Protocol):
    """The shape of a draft, in words: how it is drafted, and how it is verified."""

    @property
    def description(self) -> str: ...  # draft execution
    @property
    def walk(self) -> str: ...  # verification execution


LINEAR, TREE = "linear, one pass", "tree, one pass"  # walks
STATES = "target-states"  # what heads see
COMPRESSIBLE = ("pixels", "target-features")  # draft model inputs that can be compressed
CTC_HEAD = "CTC head"
NEEDS: Mapping[str, str] = {  # what a recipe may need of the target; `Modality.offers` it
    "image tokens": "the target generates image tokens",
    "codebook": "a codebook of image tokens, from the model or from codebook=",
    "image input": "images in the prompt",
    "speech encoder": "an encoder of audio",
    CTC_HEAD: "a CTC head on the encoder",
    "speech tokens": "the target generates the codes of a speech codec",
    "action space": "the target's tokens are robot actions",
}


class DraftModelKind(ABC):
    """A kind of draft model: how it is recognised, loaded, bound to a target, and saved.

    It is defined in the file of its drafter and found through the recipes that name it. A *target*
    is a reader of the user's model (`mmspec.targets.readers.reader.Reader`, or the equivalent of
    the modality).
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """A noun for messages: "draft model", "feature head"."""

    @abstractmethod
    def accepts(self, model: Any) -> bool:
        """Whether a loaded model is of this kind."""

    @abstractmethod
    def owns(self, folder: Path) -> bool:
        """Whether a folder holds one; decided without reading weights."""

    @abstractmethod
    def load(self, source: str | Path, target: Any, dtype: torch.dtype | None = None) -> Any:
        """Load a model from a folder or a hub name; safetensors only, in `dtype` or as saved.

        Raises ValueError for other content.
        """

    def is_in_checkpoint(self, source: Any) -> bool:
        """Whether the checkpoint of a model, or in a folder, contains one; no tensor is read."""
        return False

    def find(self, target: Any) -> Any | None:
        """The one that the target's own checkpoint contains, or None.

        Raises ValueError for one that is incomplete.
        """
        return None

    def unwrap(self, model: Any) -> Any:
        """The network of what was given as a draft model."""
        return model

    def skeleton(self, source: str | Path, target: Any) -> Any:
        """The model for `mmspec doctor`, if possible on the meta device; default: `load`."""
        return self.load(source, target)

    @abstractmethod
    def read(self, model: Any, target: Any, sees: str) -> Any:
        """Bind the model to a target; the result is the `drafter` of a `Kit`.

        Raises ValueError where it cannot draft for this target, or not see what it should.
        """

    def default_sees(self, model: Any, target: Any, asked: str) -> str:
        """What it sees, where a recipe or a user asked for that; "auto" leaves it open.

        Raises ValueError for what this sort can never see.
        """
        return asked

    @abstractmethod
    def random(self, target: Any, seed: int) -> Any:
        """A model that could draft for this target, with random weights, for certificates."""

    def save(self, model: Any, folder: Path, target: Any, drafter: Any) -> None:
        """Write what `load` reads; `drafter` was built from it and may hold further weights."""
        model.save_pretrained(folder)


@dataclass(frozen=True)
class Kit:
    """What a recipe's draft architecture is built from."""

    target: Any  # a `Backbone`, or the `ChainTarget` of a denoising chain
    drafter: Any | None  # the draft model as its kind reads it; None = the recipe takes none
    shape: Any
    sees: str
    compressor: Any | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    kv: Any | None = None  # which of the target's keys and values the drafter reads
    actions: ActionSpace | None = None  # of a policy; None = the target is no policy

    @property
    def space(self) -> ActionSpace:
        """The action space of the target. Raises ValueError for a model that is no policy."""
        if self.actions is None:
            raise ValueError(
                "this recipe needs an action space, and the model has none; give actions=, or a "
                "policy whose configuration has norm_stats"
            )
        return self.actions

    def load_option(self, name: str, kind: Any) -> Any:
        """An option that is a `kind` or a file of `kind.load`; None where none is given.

        Raises ValueError for anything else.
        """
        given = self.options[name]
        if isinstance(given, str | Path):
            return kind.load(given)
        if given is not None and not isinstance(given, kind):
            raise ValueError(
                f"{name} is {with_article(type(given).__name__)}; give a {kind.__name__} of "
                f"{kind.__module__}, or its file"
            )
        return given


@dataclass(frozen=True)
class Deferred(Generic[Made]):
    """A verifier or a gate that depends on the model (its codebook) or on an option.

    `resolve` makes it when the recipe is bound; the fields declare what is known before.
    """

    make: Callable[[Kit], Made]
    description: str  # walk and rule, or what the gate looks at
    lossless: bool = False  # whether whatever is made is
    couples: bool = False  # as for a `Verifier`
    kinds: tuple[Kind, ...] = (Kind.WOR, Kind.IID, Kind.DET)  # what rules can judge


@dataclass(frozen=True)
class Recipe:
    """One method in five parts.

    Draft architecture, draft execution, draft optimisation, verification execution, verification
    optimisation.

    The verifier carries the last two: its walk (how the draft is traversed) and its rule (what is
    accepted).
    """

    architecture: Callable[[Kit], Any]  # draft architecture: makes the `Drafter`
    execution: Any  # an `Execution`: a `Shape` of tokens, or the `Window` of a denoising chain
    verifier: Verifier | Deferred[Verifier]  # verification execution and optimisation
    optimisation: str = "none"  # draft optimisation: how the drafter was or is tuned
    compressor: Any | None = None  # of the visual tokens that the drafter reads
    sees: str = "nothing"  # default input of the draft model
    draft_model: tuple[DraftModelKind, ...] = ()  # kinds that drafter= may be; empty = takes none
    needs: tuple[str, ...] = ()  # what the target must offer: keys of `NEEDS`
    options: Mapping[str, Any] = field(default_factory=dict)  # further options and their defaults
    least: Mapping[str, int] = field(default_factory=dict)  # smallest values of whole options
    idle_without: str | None = None  # the option without which it drafts nothing
    gate: Gate | Deferred[Gate] | None = None
    paper: str = ""
    reconstructed: str = ""  # what is not from the paper or its code
    records_distribution: bool = True  # whether drafts carry the distributions they were drawn from
    decodes: str = "tokens"  # ids; "latents": a chain; "patches": continuous tokens; as a modality
    kv: Any | None = None  # the target's keys and values that the drafter reads; None = none
    training: Any | None = None  # `mmspec.training.trainable.DrafterTraining` of `mmspec train`
    name: str = ""  # the file name; filled by `recipes.get`
    hears: InitVar[bool] = False  # deprecated: needs=("CTC head",)

    def __post_init__(self, hears: bool) -> None:
        if hears:
            warnings.warn('hears=True is now needs=("CTC head",)', FutureWarning, stacklevel=3)
            object.__setattr__(self, "needs", (*self.needs, CTC_HEAD))

    @property
    def exact(self) -> bool:
        """Whether the output distribution is the target's."""
        return self.verifier.lossless and self.gate is None and self.records_distribution

    @property
    def takes_drafter(self) -> bool:
        """Whether drafter= must be given."""
        return bool(self.draft_model)

    @property
    def drafter_description(self) -> str:
        """What drafter= may be, with its article."""
        return with_article(" or ".join(kind.description for kind in self.draft_model))

    def axes(self) -> dict[str, str]:
        """A description of each of the five parts."""
        return {
            "draft architecture": self.architecture.__name__.replace("_", " "),
            "draft execution": self.execution.description,
            "draft optimisation": self.optimisation,
            "verification execution": self.execution.walk,
            "verification optimisation": self.verifier.description
            + ("" if self.gate is None else f"; {self.gate.description}"),
        }


def resolve(part: Part | Deferred[Part], kit: Kit) -> Part:
    """The verifier or gate itself, or what `Deferred.make` returns for this model."""
    return part.make(kit) if isinstance(part, Deferred) else part


def pair(drafter: Drafter, verifier: Verifier, target: Any) -> Drafter:
    """The drafter, set to the kind of proposals that the verifier prefers.

    Raises ValueError if the verifier would be biased (no common kind), if it takes chains only, or
    if the target's cache cannot branch.
    """
    if drafter.uses_trees and not verifier.uses_trees:
        raise ValueError(
            f"{type(verifier).__name__} verifies chains, but the drafter proposes trees; give "
            "length= instead of tree=, or another verifier"
        )
    if drafter.uses_trees and not target.reads_trees:
        raise ValueError(
            f"{type(target.model).__name__} {target.obstacle}, so it reads chains only; give "
            "length= instead of tree="
        )
    if drafter.carries_tokens and verifier.looks_ahead:
        raise ValueError(
            f"{type(verifier).__name__} decides about a token by looking at later ones, which "
            f"biases those that {type(drafter).__name__} carries over to its next draft; give "
            "verifier='rejection' or verifier='coupled'"
        )
    for kind in verifier.kinds:
        if kind in drafter.kinds:
            return drafter if drafter.kinds == (kind,) else drafter.with_kind(kind)
    raise ValueError(
        f"{type(verifier).__name__} is exact for {_names(verifier.kinds)} proposals, but "
        f"{type(drafter).__name__} draws {_names(drafter.kinds)}; choose another verifier or tree"
    )


def _names(kinds: tuple[Kind, ...]) -> str:
    return ", ".join(kind.name for kind in kinds)
