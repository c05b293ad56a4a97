"""From the public header to everything that must agree with it."""
