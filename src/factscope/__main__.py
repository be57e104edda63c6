"""python -m factscope."""

from factscope.cli.main import main

if __name__ == "__main__":
    main()
