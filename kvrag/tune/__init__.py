"""What calibration and placing measure of a model, an index and its stores."""
