"""`splitpoint simulate`: devices under a trace by discrete events, with the live policy."""
