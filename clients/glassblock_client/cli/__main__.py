"""`python -m glassblock_client.cli` is `python -m glassblock_client`, and that is `glassblock`."""

from glassblock_client.cli import main

if __name__ == "__main__":
    main()
