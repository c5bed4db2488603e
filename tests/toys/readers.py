"""What reads a toy, as its modality says."""

from __future__ import annotations

from typing import Any

import mmspec
from mmspec.targets.readers.reader import Family, Reader


def backbone(model: Any) -> Reader:
    """The reader that `accelerate` binds."""
    found: Reader = mmspec.accelerate(model, "plain").session.bound.backbone
    return found


def find_family(model: Any) -> Family:
    """The `Family` that its reader uses."""
    return backbone(model).family
