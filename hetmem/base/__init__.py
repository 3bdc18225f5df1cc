"""The base of all packages: the budget and the environment, hardware profiles, sizes as text, atomic writes."""
