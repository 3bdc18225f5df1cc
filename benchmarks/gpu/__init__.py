"""`make gpu`: ten minutes on a GPU that tell everything."""
