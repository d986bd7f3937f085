"""The entry point of the program `holdfast`, which runs before the slow imports of the command line."""

from __future__ import annotations

from holdfast.interrupts import end_at_once


def main() -> None:
    """Run the command line."""
    end_at_once(3, "Ctrl-C: stopped before anything was started.\n")
    from holdfast.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
