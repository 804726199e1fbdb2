"""What stores cost, hold and survive: `kvrag bench store`."""
