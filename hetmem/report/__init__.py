"""What a managed module did: the event log and counters -> text, JSON, an HTML page, a trace. Only reads."""
