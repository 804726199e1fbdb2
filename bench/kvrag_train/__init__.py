"""Training of link tokens and anchors, and of the small model that ships with kvrag."""
