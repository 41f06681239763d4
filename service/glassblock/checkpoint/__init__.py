"""Files into named tensors with meaning: containers, indexes, configs, families, layers.

Nothing here believes a file: lengths, offsets, names and links are checked before anything is opened or read.
What is wrong with a checkpoint is a value (a fault) until somebody wants to run it.
"""
