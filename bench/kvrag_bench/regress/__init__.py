"""`kvrag bench regress`: ratios of speed and quality, compared with those of the last release."""
