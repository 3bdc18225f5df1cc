"""What autograd saves for backward: moved to host memory, and fetched back when a node of the backward asks for it."""
