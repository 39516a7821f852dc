"""`python -m interlock` is the `interlock` command."""

from interlock.cli import main

if __name__ == "__main__":
    main()
