"""What is in the arena, who finds it, and what has to go."""

from __future__ import annotations

from tools.monitoring.panels import Dashboard, Form, Panel, Query, Row, Unit

_ROOM = Row(
    "Is there room?",
    (
        Panel(
            "Slots by state",
            Unit.NUMBER,
            "The whole arena. Full of `sealed` is what a cache should be. Much `writing`: "
            "prefills are under way; `quarantined` that stays: a writer died and is not provably "
            "gone (`splitpoint arena inspect`).",
            (Query("sum by (state) (splitpoint_store_slots)", "{{state}}"),),
            Form.STACK,
        ),
        Panel(
            "Slots in use",
            Unit.SHARE,
            "Not free, of all. 100 % is fine as long as nothing is refused (next but one).",
            (Query("store:slots_in_use:ratio", "{{instance}}"),),
            top=1,
        ),
        Panel(
            "Leased slots",
            Unit.NUMBER,
            "Sealed slots that running requests keep from eviction, beside all sealed ones "
            "(dashed). Near all of them: nothing can be evicted; a larger arena (--host-memory) or "
            "fewer requests at once.",
            (
                Query("sum by (instance) (splitpoint_store_leased_slots)", "leased {{instance}}"),
                Query(
                    'sum by (instance) (splitpoint_store_slots{state="sealed"})',
                    "sealed {{instance}}",
                    is_limit=True,
                ),
            ),
        ),
        Panel(
            "Refused reservations",
            Unit.PER_SECOND,
            "Nothing more could be evicted: the arena is too small for what runs. Requests go on "
            "without storing; streamed ones wait.",
            (
                Query(
                    "sum by (instance) "
                    "(rate(splitpoint_store_refused_reservations_total[$__rate_interval]))",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Leases and workers",
            Unit.NUMBER,
            "Open leases grow without requests that run: a leak, please report it. Sessions: "
            "attached workers; fewer than workers: somebody lost the store.",
            (
                Query("splitpoint_store_leases", "leases {{instance}}"),
                Query("splitpoint_store_sessions", "attached workers {{instance}}"),
            ),
        ),
        Panel(
            "Size of the arena",
            Unit.BYTES,
            "Of the shared-memory file.",
            (Query("splitpoint_store_arena_bytes", "{{instance}}"),),
            Form.NUMBER,
            width=4,
        ),
        Panel(
            "How it is kept",
            Unit.NUMBER,
            "Encoding, eviction, chunk size, and what the memory is.",
            (
                Query(
                    "splitpoint_store_info",
                    "{{instance}}: {{encoding}}, {{eviction_policy}}, {{chunk_tokens}} tokens a "
                    "chunk, activations: {{activations}}, {{memory}}",
                ),
            ),
            Form.NAMES,
            width=4,
        ),
    ),
)

_HITS = Row(
    "Is it found again?",
    (
        Panel(
            "Tokens found, of those looked up",
            Unit.SHARE,
            "The cache's worth. Low although prompts repeat: evicted before they come back (next "
            "row), other salts or tenants, or prompts that differ near their beginning.",
            (
                Query("store:prefix_hit_tokens:ratio_rate1m", "tokens {{instance}}"),
                Query(
                    "store:prefix_hit_matches:ratio_rate1m", "look-ups with any hit {{instance}}"
                ),
            ),
            top=1,
        ),
        Panel(
            "Tokens looked up",
            Unit.TOKENS_PER_SECOND,
            "And found.",
            (
                Query(
                    "sum(rate(splitpoint_store_query_tokens_total[$__rate_interval]))",
                    "looked up",
                ),
                Query("sum(rate(splitpoint_store_hit_tokens_total[$__rate_interval]))", "found"),
            ),
        ),
        Panel(
            "Look-ups",
            Unit.PER_SECOND,
            "Those that ask for a lease, and those that found something.",
            (
                Query("sum(rate(splitpoint_store_matches_total[$__rate_interval]))", "look-ups"),
                Query(
                    "sum(rate(splitpoint_store_match_hits_total[$__rate_interval]))", "with a hit"
                ),
            ),
        ),
        Panel(
            "Chunks stored",
            Unit.PER_SECOND,
            "Published; there already; kept out until their second use (--admission). Many that "
            "were there already: equal prompts computed side by side.",
            (
                Query(
                    "sum(rate(splitpoint_store_sealed_chunks_total[$__rate_interval]))",
                    "published",
                ),
                Query(
                    "sum(rate(splitpoint_store_duplicate_chunks_total[$__rate_interval]))",
                    "there already",
                ),
                Query(
                    "sum(rate(splitpoint_store_unadmitted_chunks_total[$__rate_interval]))",
                    "kept out",
                ),
            ),
        ),
        Panel(
            "Write-back by workers",
            Unit.PER_SECOND,
            "`failed`: see the worker's log; `unwanted`: the store did not want them.",
            (
                Query(
                    "sum by (result) (rate(splitpoint_worker_write_back_chunks_total"
                    '{worker=~"$worker"}[$__rate_interval]))',
                    "{{result}}",
                ),
            ),
            Form.STACK,
            colours={"stored": "green", "unwanted": "blue", "failed": "red"},
        ),
        Panel(
            "To and from other hosts",
            Unit.BYTES_PER_SECOND,
            "Payload over gRPC; 0 on one host.",
            (
                Query(
                    "sum by (direction) "
                    "(rate(splitpoint_store_remote_bytes_total[$__rate_interval]))",
                    "{{direction}}",
                ),
            ),
        ),
    ),
)

_EVICTION = Row(
    "What has to go?",
    (
        Panel(
            "Evictions",
            Unit.PER_SECOND,
            "`room`: a writer waited for it; --evict-above moves that into the background "
            "(`watermark`).",
            (
                Query(
                    "sum by (policy, cause) "
                    "(rate(splitpoint_store_evictions_total[$__rate_interval]))",
                    "{{policy}} {{cause}}",
                ),
            ),
            Form.STACK,
        ),
        Panel(
            "Evicted, by uses",
            Unit.PER_SECOND,
            "Many at 0: one-shot prompts push out what others share; --admission second-use keeps "
            "them out. Many used often: the arena is too small.",
            (
                Query(
                    "sum by (uses) (rate(splitpoint_store_evicted_by_use_total[$__rate_interval]))",
                    "used {{uses}} times",
                ),
            ),
            Form.STACK,
        ),
        Panel(
            "Evicted unused",
            Unit.SHARE,
            "Share of evicted chunks that nobody had used again.",
            (Query("store:evicted_unused:ratio_rate1m", "unused {{instance}}"),),
            warn=0.5,
            alarm=0.8,
            top=1,
            width=4,
        ),
        Panel(
            "Age at eviction",
            Unit.SECONDS,
            "From sealing on, of chunks evicted in the last minute. Shorter than the time until "
            "prompts come back: a larger arena.",
            (Query("store:evicted_age_seconds:mean_rate1m", "mean {{instance}}"),),
            width=4,
        ),
    ),
)

_TRUST = Row(
    "Is it sound?",
    (
        Panel(
            "Checksum failures, last hour",
            Unit.NUMBER,
            "Bytes changed under the store. Not 0: test the memory (`splitpoint arena verify`), "
            "look for a process that writes into the file.",
            (
                Query(
                    "sum by (instance) (increase(splitpoint_store_checksum_failures_total[1h]))",
                    "{{instance}}",
                ),
            ),
            Form.NUMBER,
            width=4,
            warn=1,
            alarm=1,
        ),
        Panel(
            "Damaged chunks, last hour",
            Unit.NUMBER,
            "Sealed chunks that changed while the store ran, found by scrubbing or by workers. Not "
            "0: as checksum failures.",
            (
                Query(
                    "sum by (instance) (increase(splitpoint_store_damaged_chunks_total[1h]))",
                    "{{instance}}",
                ),
            ),
            Form.NUMBER,
            width=4,
            warn=1,
            alarm=1,
        ),
        Panel(
            "Chunks compared by workers",
            Unit.PER_SECOND,
            "Reads of chunks in which a worker compared the checksum, by the outcome.",
            (
                Query(
                    "sum by (result) "
                    '(rate(splitpoint_worker_verified_chunks_total{worker=~"$worker"}[1m]))',
                    "{{result}}",
                ),
            ),
            width=4,
        ),
        Panel(
            "Scrub pass",
            Unit.SHARE,
            "How much of the arena the present pass of the scrubber has read back.",
            (Query("splitpoint_store_scrub_progress_ratio", "{{instance}}"),),
            Form.NUMBER,
            width=4,
        ),
        Panel(
            "Last scrub pass",
            Unit.SECONDS,
            "Longer than --scrub-seconds: --scrub-rate is too low for it. 0: none is complete.",
            (Query("splitpoint_store_scrub_pass_seconds", "{{instance}}"),),
            Form.NUMBER,
            width=4,
        ),
        Panel(
            "Scrubbing reads",
            Unit.BYTES_PER_SECOND,
            "At most --scrub-rate.",
            (
                Query(
                    "sum by (instance) (rate(splitpoint_store_scrubbed_bytes_total[1m]))",
                    "{{instance}}",
                ),
            ),
            width=4,
        ),
        Panel(
            "Integrity violations",
            Unit.NUMBER,
            "Of the store's own books; not 0 is a bug, please report it, and restart the store.",
            (Query("splitpoint_store_integrity_violations", "{{instance}}"),),
            Form.NUMBER,
            width=4,
            warn=1,
            alarm=1,
        ),
        Panel(
            "Found at the start",
            Unit.NUMBER,
            "Chunks adopted, refused as damaged, and quarantined. Many refused: as checksum "
            "failures.",
            (Query("sum by (result) (splitpoint_store_recovered_chunks)", "{{result}}"),),
            Form.NUMBER,
            width=4,
        ),
        Panel(
            "Starts on this arena",
            Unit.NUMBER,
            "Grows by one with each. Without an upgrade: the store dies; see its log.",
            (Query("splitpoint_store_epoch", "{{instance}}"),),
            Form.NUMBER,
            width=4,
        ),
        Panel(
            "Former arena lost",
            Unit.YES_NO,
            "Yes: this store began empty because its arena was removed, truncated or damaged from "
            "outside; the cache is cold. `splitpoint status` says what to look at.",
            (Query("splitpoint_store_former_arena_lost", "{{loss}} {{instance}}"),),
            Form.NUMBER,
            width=8,
            warn=1,
            alarm=1,
        ),
        Panel(
            "Reading records at the start",
            Unit.SECONDS,
            "How long workers had to wait for the store.",
            (Query("splitpoint_store_recovery_seconds", "{{instance}}"),),
            Form.NUMBER,
            width=4,
        ),
        Panel(
            "Sequences that lost chunks, last hour",
            Unit.NUMBER,
            "They began anew, unseen by clients; a store that restarts is the usual cause.",
            (
                Query(
                    "sum by (worker) "
                    '(increase(splitpoint_worker_chunk_losses_total{worker=~"$worker"}[1h]))',
                    "worker {{worker}}",
                ),
            ),
            Form.NUMBER,
            width=4,
        ),
    ),
)

STORE = Dashboard(
    "store",
    "The store",
    "Slots by state, hits, evictions, leases.",
    (_ROOM, _HITS, _EVICTION, _TRUST),
)
