"""`python -m glassblock_client`: the command line, where its script is not on the path."""

from glassblock_client.cli import main

if __name__ == "__main__":
    main()
