"""Discrete-event simulation: the very `Core` that serves, with cost models in place of workers.

The server never imports this package.
"""
