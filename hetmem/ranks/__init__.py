"""Several ranks of one machine that train one model: what they share in memory, and how they wait for each other."""
