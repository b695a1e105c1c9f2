"""Checkpoints that ship with the project, and what makes them."""
