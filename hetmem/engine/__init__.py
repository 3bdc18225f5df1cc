"""What runs a managed module: hooks, operators, gradients, writes, and the copies that each of them needs."""
