"""Checksums of stored chunks, and the scrubber that verifies them."""
