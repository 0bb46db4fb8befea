"""`splitpoint doctor`: checks of a host before a start."""
