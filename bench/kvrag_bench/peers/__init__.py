"""`kvrag bench peers`: other tools for the same work, each in a process of its own."""
