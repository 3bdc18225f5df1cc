"""A few steps of a plan on a clock: the same decisions as in a run, carried out by links that are numbers."""
