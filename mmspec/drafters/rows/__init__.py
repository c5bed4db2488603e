"""Drafts of whole rows of a picture."""
