"""Adapters to model libraries."""
