"""The command `factscope`, also as `python -m factscope`."""

import sys


def main() -> None:
    """Run the command of `sys.argv`; Ctrl-C is one line from the first import on."""
    try:
        from factscope.cli.app import main

        main()
    except KeyboardInterrupt:
        print("factscope: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
