"""python -m holdfast: the command line, where the console script is not on PATH."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
