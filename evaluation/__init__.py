"""Measures checkpoints. Imports nothing of the rooms that make them."""
