"""`python -m holdfast` is `holdfast`."""

from __future__ import annotations

from holdfast.cli.entry import main

if __name__ == "__main__":
    main()
