"""The rows of the family table, a module for each kind of family; `architectures` puts them together."""
