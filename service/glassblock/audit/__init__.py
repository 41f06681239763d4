"""Evidence about a checkpoint, gathered in one pass, and the rules that turn it into findings."""
