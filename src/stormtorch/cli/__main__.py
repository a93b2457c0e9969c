"""`python -m stormtorch.cli`: the same as `stormtorch`."""

from stormtorch.cli.app import main

main()
