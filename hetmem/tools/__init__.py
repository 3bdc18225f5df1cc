"""Tools of the command line that measure or examine this machine: probe, doctor, and the cost of calls."""
