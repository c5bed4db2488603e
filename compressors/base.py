"""The contract of this shelf, kept in `mmspec.visual` because the engine needs it as well."""

from mmspec.visual import Compressed, Compressor, Features

__all__ = ["Compressed", "Compressor", "Features"]
