"""Drafts of trained models."""
