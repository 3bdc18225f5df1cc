"""What a managed module did: an event log and counters -> text, JSON, one HTML page, a trace for Perfetto. Only reads."""
