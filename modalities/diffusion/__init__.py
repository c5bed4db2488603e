"""Pipelines of diffusers."""
