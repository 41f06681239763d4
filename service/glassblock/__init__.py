"""Glassblock looks inside the blocks of a transformer checkpoint.

Importing this package loads neither torch nor FastAPI: the client and the command line
share its `wire`, `reports` and `errors`. The service side lives in `numerics`, `checkpoint`,
`audit`, `operations`, `jobs` and `api`, each importing only what lies below it.
"""

__version__ = "0.1.0"
