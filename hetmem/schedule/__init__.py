"""What decides: layouts, homes, traces, residency and what of a step runs where. No torch, no clock, no I/O."""
