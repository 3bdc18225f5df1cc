"""What measures and examines this machine for the command line: probe, bench, doctor, overheads."""
