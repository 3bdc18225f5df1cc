"""Tools of the command line: they measure or examine this machine, keep plans, and write them as programs."""
