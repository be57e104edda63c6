"""python -m factscope."""

from factscope.cli.app import main

if __name__ == "__main__":
    main()
