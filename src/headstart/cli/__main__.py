"""`python -m headstart.cli`, the same as `headstart`."""

from headstart.cli import main

if __name__ == "__main__":
    main()
