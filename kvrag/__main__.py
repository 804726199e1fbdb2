"""`python -m kvrag`: the entry point for launchers that start several processes."""

from kvrag.cli.main import run

if __name__ == "__main__":
    run()
