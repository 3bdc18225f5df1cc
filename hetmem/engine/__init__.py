"""Runs a managed module: homes, copies and their leases, gradients, and checks of writes. No hooks of torch."""
