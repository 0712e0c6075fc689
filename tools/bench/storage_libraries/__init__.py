"""One module per library: the same tasks on the same data, each in a process of its own."""
