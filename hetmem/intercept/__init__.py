"""Hooks into torch, which show what a model uses: of modules and autograd, modes, and compiled code."""
