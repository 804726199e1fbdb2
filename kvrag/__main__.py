"""`python -m kvrag`: what launchers of several processes start."""

from kvrag.cli.main import run

if __name__ == "__main__":
    run()
