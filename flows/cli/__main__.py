"""`python -m flows.cli` is `model-optimizer`."""

from flows.cli.main import main

main()
