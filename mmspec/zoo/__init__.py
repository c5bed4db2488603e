"""The embedded zoo: a procedural Scene world and small trained checkpoints, so that nothing need be
downloaded to try, test or benchmark.

    from mmspec import zoo

    target, drafter = zoo.load("llava"), zoo.load("llava-drafter")
    processor = zoo.processor("llava")
"""

from mmspec.zoo.catalogue import Entry, bundled_scene, info, is_present, names, path
from mmspec.zoo.loading import load, processor, vae

__all__ = [
    "Entry",
    "bundled_scene",
    "info",
    "is_present",
    "load",
    "names",
    "path",
    "processor",
    "vae",
]
