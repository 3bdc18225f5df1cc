"""Reports on a managed module: turns its event log and counters into text, JSON, an HTML page or a trace. Read-only."""
