"""Measurements of a model, an index and its stores, for calibration and the choice of a store."""
