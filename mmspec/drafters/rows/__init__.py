"""Drafts of whole rows of an image."""
