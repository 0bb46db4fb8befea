"""The worker's side of the KV store: sessions, write-back, fetches from other hosts, codecs."""
