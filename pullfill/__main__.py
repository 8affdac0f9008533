"""`python -m pullfill`: the `pullfill` command."""

from pullfill.deploy.cli import main

if __name__ == "__main__":
    main()
