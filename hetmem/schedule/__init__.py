"""What decides and foresees: layouts, homes, residency, the simulator and the search for a plan. No torch."""
