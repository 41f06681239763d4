"""One method per operation, and the only place where tensors become numbers on the wire."""
