"""Rows that a selection chose: fetched from the store by index, and kept in device pages."""
