"""Adapters: what the engine must know about each family of models."""
