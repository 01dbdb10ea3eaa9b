"""`python -m smcsample`."""

from smcsample.cli import main

main()
