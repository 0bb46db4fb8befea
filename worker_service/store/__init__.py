"""The worker's side of the KV store: sessions, calls, write-back, codecs."""
