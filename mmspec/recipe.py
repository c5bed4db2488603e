"""A recipe names a paper's five parts; binding it to a model checks that they fit together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from mmspec.draft import Drafter, Gate, Kind, Verifier
from mmspec.errors import an

if TYPE_CHECKING:
    from mmspec.codes.actions import ActionSpace

Part = TypeVar("Part")
Made = TypeVar("Made", covariant=True)


class Execution(Protocol):
    """The shape of a draft, in words: how it is drafted, and how it is verified."""

    @property
    def words(self) -> str: ...  # draft execution
    @property
    def walk(self) -> str: ...  # verification execution


LINEAR, TREE = "linear, one pass", "tree, one pass"  # walks
STATES = "target-states"  # what heads see
COMPRESSIBLE = ("pixels", "target-features")  # what a draft model sees that can be thinned


class DraftModelKind(ABC):
    """A sort of draft model: how one is told, loaded, bound to a target, and saved.

    Stands in the file of its drafter; nobody else knows which sorts there are. A *target* is what
    reads the user's model (`mmspec.targets.readers.reader.Reader`, or what a modality has in its
    place).
    """

    @property
    @abstractmethod
    def words(self) -> str:
        """What people call it: "draft model", "feature head"."""

    @abstractmethod
    def accepts(self, model: Any) -> bool:
        """Whether a loaded model is of this sort."""

    @abstractmethod
    def owns(self, folder: Path) -> bool:
        """Whether a folder holds one, as far as can be told without reading weights."""

    @abstractmethod
    def load(self, source: str | Path, target: Any, dtype: torch.dtype | None = None) -> Any:
        """A model from a folder or a hub name; safetensors only, as it was saved or in `dtype`.

        Raises ValueError for what is none.
        """

    @abstractmethod
    def read(self, model: Any, target: Any, sees: str) -> Any:
        """The model bound to a target: what stands in a `Kit` as `drafter`.

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
        """Write what `load` reads; `drafter` was built of it and may hold more that is learned."""
        model.save_pretrained(folder)


@dataclass(frozen=True)
class Kit:
    """What a recipe's draft architecture is built from."""

    target: Any  # a `Backbone`, or the `ChainTarget` of a denoising chain
    drafter: Any | None  # the draft model, as its sort reads it, where the recipe takes one
    shape: Any
    sees: str
    compressor: Any | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    kv: Any | None = None  # which of the target's keys and values the drafter reads
    actions: ActionSpace | None = None  # what its tokens mean to a robot; None = it is no policy

    @property
    def space(self) -> ActionSpace:
        """What tokens mean to a robot. Raises ValueError for a model that is no policy."""
        if self.actions is None:
            raise ValueError(
                "this recipe goes by what tokens mean to a robot, and the model says nothing about "
                "that; give actions=, or a policy whose configuration has norm_stats"
            )
        return self.actions


@dataclass(frozen=True)
class Deferred(Generic[Made]):
    """What a verifier or a gate is made of once a model is known: its codebook, or an option.

    It stands in the recipe until that is bound (`resolve`), and says what is known before.
    """

    make: Callable[[Kit], Made]
    words: str  # walk and rule, or what the gate looks at
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
    compressor: Any | None = None  # of what the drafter sees of the picture
    sees: str = "nothing"  # default sight of the draft model
    draft_model: tuple[DraftModelKind, ...] = ()  # sorts that drafter= may be of; empty = none
    options: Mapping[str, Any] = field(default_factory=dict)  # further knobs and their defaults
    gate: Gate | Deferred[Gate] | None = None
    paper: str = ""
    reconstructed: str = ""  # what is not from the paper or its code
    records_distribution: bool = (
        True  # whether drafts carry the distributions that their tokens were drawn from
    )
    decodes: str = "tokens"  # ids; "latents": a chain; "patches": continuous tokens; as a modality
    kv: Any | None = None  # of the target's, that the drafter reads; None = it reads none
    hears: bool = False  # whether it needs a CTC head on the target's encoder
    training: Any | None = None  # `mmspec.training.trainable.DrafterTraining` of `mmspec train`
    name: str = ""  # the file name; filled by `recipes.get`

    @property
    def exact(self) -> bool:
        """Whether the output distribution is the target's."""
        return self.verifier.lossless and self.gate is None and self.records_distribution

    @property
    def takes_drafter(self) -> bool:
        """Whether drafter= must be given."""
        return bool(self.draft_model)

    @property
    def wanted(self) -> str:
        """What drafter= may be, in words with their article."""
        return an(" or ".join(kind.words for kind in self.draft_model))

    def axes(self) -> dict[str, str]:
        """The five parts in words."""
        return {
            "draft architecture": self.architecture.__name__.replace("_", " "),
            "draft execution": self.execution.words,
            "draft optimisation": self.optimisation,
            "verification execution": self.execution.walk,
            "verification optimisation": self.verifier.words
            + ("" if self.gate is None else f"; {self.gate.words}"),
        }


def resolve(part: Part | Deferred[Part], kit: Kit) -> Part:
    """A verifier or a gate itself, or what it is to become for this model."""
    return part.make(kit) if isinstance(part, Deferred) else part


def pair(drafter: Drafter, verifier: Verifier, target: Any) -> Drafter:
    """The drafter, drawing the kind of proposals the verifier likes best.

    Raises ValueError where the verifier would be biased (no kind suits both), where it takes chains
    only, or where the target's memory cannot branch.
    """
    if drafter.trees and not verifier.trees:
        raise ValueError(
            f"{type(verifier).__name__} verifies chains, but the drafter proposes trees; give "
            "length= instead of tree=, or another verifier"
        )
    if drafter.trees and not target.can_branch:
        raise ValueError(
            f"{type(target.model).__name__} {target.obstacle}, so it reads chains only; give "
            "length= instead of tree="
        )
    if drafter.carries and verifier.looks_ahead:
        raise ValueError(
            f"{type(verifier).__name__} decides about a token by looking at later ones, which "
            f"biases those that {type(drafter).__name__} carries over to its next draft; give "
            "verifier='rejection' or verifier='coupled'"
        )
    for kind in verifier.kinds:
        if kind in drafter.kinds:
            return drafter if drafter.kinds == (kind,) else drafter.drawing(kind)
    raise ValueError(
        f"{type(verifier).__name__} is exact for {_names(verifier.kinds)} proposals, but "
        f"{type(drafter).__name__} draws {_names(drafter.kinds)}; choose another verifier or tree"
    )


def _names(kinds: tuple[Kind, ...]) -> str:
    return ", ".join(kind.name for kind in kinds)
