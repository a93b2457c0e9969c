"""`python -m stormtorch`: same as the command `stormtorch`, for launchers that start modules."""

from stormtorch.cli.app import main

if __name__ == "__main__":
    main()
