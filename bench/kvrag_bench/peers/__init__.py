"""`kvrag bench peers`: other tools for the same work, each in a separate process."""
