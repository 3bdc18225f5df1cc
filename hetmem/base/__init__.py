"""What everything else stands on: sizes as text, the budget and the environment, files written whole."""
