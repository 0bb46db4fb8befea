"""`splitpoint bench decode`: decoding beside transformers."""
