"""Factors of screens: made from calibration text in closed form, or trained on a frozen model."""
