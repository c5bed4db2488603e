"""Drafts copied from earlier or given text."""
