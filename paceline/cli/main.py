"""The command `paceline`. Exit codes: 0 done, 2 bad input (one line names it), 1 anything else."""

import sys

from paceline.cli.lasting import lasting

with lasting():
    from paceline.cli.app import app


def main() -> None:
    try:
        app()
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
