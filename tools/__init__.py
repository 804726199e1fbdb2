"""Programs for people who work on kvrag; none of them is part of the package."""
