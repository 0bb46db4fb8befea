"""`splitpoint bench restore`: a cached prefix restored by every method."""
