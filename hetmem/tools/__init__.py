"""What measures and examines this machine for the command line: probe, doctor, what calls cost."""
