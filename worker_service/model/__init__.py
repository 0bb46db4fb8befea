"""Decoder models written for this project: one decoder, configured by data."""
