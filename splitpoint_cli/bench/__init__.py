"""`splitpoint bench`: Splitpoint beside its peers and its limits, on the user's own machine."""
