"""The worker's side of the KV store: sessions, streams of chunks, write-back, codecs."""
