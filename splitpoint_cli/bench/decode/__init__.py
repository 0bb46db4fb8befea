"""`splitpoint bench decode`: decoding beside other engines and the memory's limit."""
