// Attention of a CPU that reads pages where they lie, by number: the kernels of paged_attention.py.
//
// There is one order of reduction for every query, in decode steps and in prefills. A unit is at
// most ROWS rows of a page, from a multiple of ROWS on. A unit's part of a query is its peak, the total
// of its weights and the sums of its values: products of query and key are summed by `sum`'s tree
// over chains in ascending order, weights lane by lane, values in ascending rows. Parts are merged onto
// a state one after the other, in the order of positions. A query's result depends therefore on
// its own keys and values alone, finite or not: not on other queries, threads, pages' places, or the
// steps that a prompt is computed in. Sums are fp32. It is compiled for one HEAD_DIM and one ELEMENT.

#include <algorithm>

#include "vectors.h"

static const int VECTORS = (HEAD_DIM + LANES - 1) / LANES;
static const int REST = HEAD_DIM % LANES;
// Query heads of a block: their sums stay in registers.
static const int MOST_HEADS = NARROW || VECTORS <= 4 ? 4 : VECTORS <= 8 ? 2 : 1;
// Rows of a unit: UNIT_ROWS of paged_attention.py. Their scores stay in the first cache.
static const int ROWS = 128;
static const int WIDTH = VECTORS * LANES;
static const float LEAST = -3.402823466e+38f;

// Vector i of one row of HEAD_DIM elements; the last one may be short.
template <class T>
static inline Floats load_part(const T* row, int i) {
  return REST == 0 ? load(row + i * LANES) : load_some(row + i * LANES, HEAD_DIM - i * LANES);
}
static inline void store_part(Element* row, int i, Floats values) {
  store_some(row + i * LANES, values, HEAD_DIM - i * LANES);
}

static inline float exponential(float x) { return exponential(all(x))[0]; }

// cap * tanh(score / cap)
static inline Floats capped(Floats scores, float cap) {
  const Integers negative = scores < Floats{};
  const Floats size = negative ? -scores : scores;
  const Floats decay = exponential(size * (-2.0f / cap));
  const Floats result = (1.0f - decay) / (1.0f + decay) * cap;
  return negative ? -result : result;
}

// Hides the rows that a query does not see: those before `low`, and from `high` on. They weigh
// nothing even if all that it sees is -infinity.
static inline void hide(float* scores, int low, int high, int first, int last) {
  for (int row = first; row < std::min(low, last); row++) scores[row] = -__builtin_inff();
  for (int row = std::max(high, first); row < last; row++) scores[row] = -__builtin_inff();
}

// Turns the scores of `count` rows, a multiple of LANES, to weights; hidden rows weigh 0.
static inline void weigh(float* scores, int count, float& peak, float& total) {
  Vector most = vector_of(scores);
  for (int i = LANES; i < count; i += LANES) most = larger(vector_of(scores + i), most);
  const Floats lanes = floats_of(most);
  peak = LEAST;
  for (int i = 0; i < LANES; i++) peak = std::max(peak, (float)lanes[i]);
  const Vector below = vector_of(all(-peak));
  Vector totals = {};
  for (int i = 0; i < count; i += LANES) {
    const Vector weights = exponential(plus(vector_of(scores + i), below));
    store(scores + i, weights);
    totals = plus(totals, weights);
  }
  total = sum(floats_of(totals));
}

// Peak and total of a query's state, and what its sums and those of a part are multiplied by.
struct Merging {
  float peak, total, mine, theirs;
  Merging(float own_peak, float own_total, float part_peak, float part_total) {
    peak = std::max(own_peak, part_peak);
    mine = exponential(own_peak - peak);
    theirs = exponential(part_peak - peak);
    total = multiply_add(part_total, theirs, own_total * mine);
  }
  Floats operator()(Floats own, Floats part) const {
    return multiply_add(part, all(theirs), rounded(own * mine));
  }
};

// -- decode: few queries of each sequence, one unit after the other ------------------------------

// Vector i of one row of HEAD_DIM elements, in registers.
static inline Vector part_of(const Element* row, int i) {
  return REST == 0 || i < VECTORS - 1 ? vector_of(row + i * LANES) : vector_of(load_part(row, i));
}

#if NARROW
// The sums of the lanes of 8 vectors, of whose halves these are the sums: `sum`'s tree, 8 at once.
static inline __m256 sums_of(const __m256 (&rows)[8]) {
  __m256 pairs[4], fours[2];
  for (int i = 0; i < 4; i++)
    pairs[i] = _mm256_add_ps(_mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20),
                             _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31));
  for (int i = 0; i < 2; i++)
    fours[i] = (__m256)_mm256_add_ps(_mm256_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
                                     _mm256_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee));
  return _mm256_add_ps(_mm256_shuffle_ps(fours[0], fours[1], 0x88), _mm256_shuffle_ps(fours[0], fours[1], 0xdd));
}
#endif

// Vectors of a value that are added at once for H heads. Of 16 registers, their sums take 8, or each would wait for
// its last product.
template <int H>
static constexpr int AT_ONCE = NARROW ? std::max(1, std::min(4 / H, VECTORS)) : VECTORS;

// Scores of H query heads with `count` consecutive keys, ROWS apart. `seen`: keys at a 0 are not read
// and have no score; null: all are read. Behind the last key there is room for a vector. `values`: of the same rows.
template <int H>
static inline void score(const Element* keys, const Element* values, const float* queries, int count, float* scores,
                         const uint8_t* seen) {
  const int at_once = NARROW ? 8 : 1;
  for (int first = 0; first < count; first += at_once) {
#if NARROW
    __m256 halves[H][8] = {};
#endif
    for (int row = first; row < std::min(first + at_once, count); row++, keys += HEAD_DIM) {
      if (seen && !seen[row]) continue;
      Vector products[H] = {};
      for (int i = 0; i < VECTORS; i++) {
        const Vector key = part_of(keys, i);
        for (int h = 0; h < H; h++)
          products[h] = add_to(products[h], key, vector_of(queries + (h * VECTORS + i) * LANES));
      }
      for (int h = 0; h < H; h++) {
#if NARROW
        halves[h][row - first] = _mm256_add_ps(products[h].low, products[h].high);
#else
        scores[h * ROWS + row] = sum(products[h]);
#endif
      }
      // They are read part by part then, which the processor does not foresee.
      const char* next = (const char*)(values + (int64_t)row * HEAD_DIM);
      for (size_t i = 0; AT_ONCE<H> < VECTORS && i < HEAD_DIM * sizeof(Element); i += 64) __builtin_prefetch(next + i);
    }
#if NARROW
    for (int h = 0; h < H; h++) _mm256_storeu_ps(scores + h * ROWS + first, sums_of(halves[h]));
#endif
  }
}

// The sums of `count` consecutive values by the weights of H heads, P vectors of them at once: they stay in
// registers. `seen`: see `score`.
template <int H, int P>
static inline void add_parts(const Element* values, const float* weights, int count, int part, float* sums,
                             const uint8_t* seen) {
  Vector added[H][P] = {};
  for (int row = 0; row < count; row++, values += HEAD_DIM) {
    if (seen && !seen[row]) continue;
    for (int i = 0; i < P; i++) {
      const Vector value = part_of(values, part + i);
      for (int h = 0; h < H; h++) added[h][i] = add_to(added[h][i], weights[h * ROWS + row], value);
    }
  }
  for (int h = 0; h < H; h++)
    for (int i = 0; i < P; i++) store(sums + (h * VECTORS + part + i) * LANES, added[h][i]);
}
template <int H>
static inline void add_values(const Element* values, const float* weights, int count, float* sums,
                              const uint8_t* seen) {
  constexpr int P = AT_ONCE<H>;
  int part = 0;
  for (; part + P <= VECTORS; part += P) add_parts<H, P>(values, weights, count, part, sums, seen);
  for (; part < VECTORS; part++) add_parts<H, 1>(values, weights, count, part, sums, seen);
}

// What `attend_units` is called with; paged_attention.py has the same structure.
struct Units {
  const Element *queries, *keys, *values;
  // Of units: their page, its rows [low, high), and the query that reads them.
  const int32_t *pages, *lows, *highs, *owners;
  // [pages of the units in their order, n_kv, page_rows]: rows at a 0 are not read. Null: all are.
  const uint8_t* seen;
  // Units order[groups[i]] ... order[groups[i + 1] - 1] are of one page and of one round.
  const int32_t *order, *groups;
  // Round r attends the groups from cuts[r] to cuts[r + 1]. Then it merges, of each query's units,
  // those from number ranks[r] to ranks[r + 1].
  const int32_t *cuts, *ranks;
  // Of parts: sums [., n_q, WIDTH], peaks and totals [., n_q]. The next round's take their places.
  float *part_sums, *part_peaks, *part_totals;
  // Query q has units firsts[q] ... firsts[q + 1] - 1, in the order of positions; places: of parts.
  const int32_t *places, *firsts;
  // The queries' state, sums [., n_q, d], peaks and totals [., n_q]: read and written. Null: there is none.
  float *sums, *peaks, *totals;
  // [., n_q, d], the normalised sums behind the last round. Null: not wanted, and parts without a state wait.
  Element* attended;
  // Elements between pages, and between heads, of keys and of values.
  int64_t key_page, key_head, value_page, value_head;
  int32_t round_count, query_count, query_heads, kv_heads, page_rows, threads;
  float scale, cap;  // 0: no cap
};

// Attends unit `n` with query heads [first, first + H), which share KV head `head`.
template <int H>
static void attend_heads(const Units& call, int n, int head, int first) {
  alignas(64) float queries[H * WIDTH], scores[H * ROWS + LANES];
  const Element* row = call.queries + ((int64_t)call.owners[n] * call.query_heads + first) * HEAD_DIM;
  for (int h = 0; h < H; h++, row += HEAD_DIM)
    for (int i = 0; i < VECTORS; i++)
      store(queries + (h * VECTORS + i) * LANES, load_part(row, i) * call.scale);
  const Element* keys = call.keys + call.pages[n] * call.key_page + head * call.key_head;
  const Element* values = call.values + call.pages[n] * call.value_page + head * call.value_head;
  // Each row has its own lane, whatever the first one is.
  const int low = call.lows[n], high = call.highs[n], start = low / LANES * LANES;
  const int count = (high - start + LANES - 1) / LANES * LANES;
  const uint8_t* seen = call.seen;
  if (seen) {
    const int page = n / ((call.page_rows + ROWS - 1) / ROWS);
    seen += ((int64_t)page * call.kv_heads + head) * call.page_rows + low;
  }
  score<H>(keys + (int64_t)low * HEAD_DIM, values + (int64_t)low * HEAD_DIM, queries, high - low,
           scores + low - start, seen);
  const int64_t place = (int64_t)call.places[n] * call.query_heads + first;
  for (int h = 0; h < H; h++) {
    float* own = scores + h * ROWS;
    const auto hide_all = [&] {
      hide(own, low - start, high - start, 0, count);
      for (int row = low; seen && row < high; row++)
        if (!seen[row - low]) own[row - start] = -__builtin_inff();
    };
    hide_all();
    if (call.cap != 0) {
      for (int i = 0; i < count; i += LANES) store(own + i, capped(load(own + i), call.cap));
      hide_all();
    }
    weigh(own, count, call.part_peaks[place + h], call.part_totals[place + h]);
  }
  add_values<H>(values + (int64_t)low * HEAD_DIM, scores + low - start, high - low,
                call.part_sums + place * WIDTH, seen);
}

static void attend_unit(const Units& call, int n, int head) {
  const int group = call.query_heads / call.kv_heads, end = (head + 1) * group;
  for (int first = head * group; first < end;) {
    const int count = std::min(MOST_HEADS, end - first);
    if (count == 4) attend_heads<MOST_HEADS < 4 ? 1 : 4>(call, n, head, first);
    else if (count == 3) attend_heads<MOST_HEADS < 4 ? 1 : 3>(call, n, head, first);
    else if (count == 2) attend_heads<MOST_HEADS < 2 ? 1 : 2>(call, n, head, first);
    else attend_heads<1>(call, n, head, first);
    first += count;
  }
}

static void merge(const Units& call, int round, int query, int head) {
  const int begin = call.firsts[query] + call.ranks[round];
  const int end = std::min(call.firsts[query] + call.ranks[round + 1], call.firsts[query + 1]);
  const bool is_last = call.attended && round == call.round_count - 1;
  if (begin >= end && !is_last) return;
  const int64_t row = (int64_t)query * call.query_heads + head;
  float peak = call.sums ? call.peaks[row] : LEAST, total = call.sums ? call.totals[row] : 0;
  Floats sums[VECTORS] = {};
  if (call.sums) memcpy(sums, call.sums + row * HEAD_DIM, HEAD_DIM * sizeof(float));
  for (int n = begin; n < end; n++) {
    const int64_t place = (int64_t)call.places[n] * call.query_heads + head;
    const Merging merging(peak, total, call.part_peaks[place], call.part_totals[place]);
    peak = merging.peak;
    total = merging.total;
    for (int i = 0; i < VECTORS; i++)
      sums[i] = merging(sums[i], load(call.part_sums + place * WIDTH + i * LANES));
  }
  if (is_last) {
    for (int i = 0; i < VECTORS; i++) store_part(call.attended + row * HEAD_DIM, i, sums[i] / total);
    return;
  }
  memcpy(call.sums + row * HEAD_DIM, sums, HEAD_DIM * sizeof(float));
  call.peaks[row] = peak;
  call.totals[row] = total;
}

// One thread attends the units of a page one after the other, so that it reads the page's rows
// from memory once.
extern "C" void attend_units(const Units* given) {
  const Units& call = *given;
#pragma omp parallel num_threads(call.threads)
  for (int round = 0; round < call.round_count; round++) {
    const int first = call.cuts[round], count = call.cuts[round + 1] - first;
#pragma omp for schedule(dynamic, 8)
    for (int task = 0; task < count * call.kv_heads; task++) {
      const int group = first + task / call.kv_heads, head = task % call.kv_heads;
      for (int i = call.groups[group]; i < call.groups[group + 1]; i++)
        attend_unit(call, call.order[i], head);
    }
    if (call.sums || call.attended) {
#pragma omp for schedule(static)
      for (int row = 0; row < call.query_count * call.query_heads; row++)
        merge(call, round, row / call.query_heads, row % call.query_heads);
    }
  }
}

// -- prefill: many consecutive queries of one sequence, blocks of them beside each other ------------

// What `attend_prompt` is called with; paged_attention.py has the same structure.
struct Prompt {
  // [T, n_q, d]; query t is at position query_position + t.
  const Element *queries, *keys, *values;
  // Page i begins at position page_position + i * page_tokens.
  const int32_t* pages;
  // The queries' state, as that of `Units`: read and written. Null: there is none before and after.
  float *sums, *peaks, *totals;
  // [T, n_q, d], the normalised sums. Null: not wanted yet.
  Element* attended;
  int64_t key_page, key_head, value_page, value_head, query_position, page_position;
  int32_t page_count, page_tokens, query_count, query_heads, kv_heads;
  int32_t window, block_rows, threads;  // window 0: all
  float scale, cap;                     // cap 0: none
};

// Rows of a block that are attended together, vectors of keys beside them, and of values: what
// is summed stays in registers.
#if defined(__AVX512F__)
static const int BUNCH = 6;
static const int PAIR = 2;
static const int BESIDE = 4;
#else
static const int BUNCH = 2;
static const int PAIR = 1;
static const int BESIDE = 2;
#endif
// Floats between the lines of transposed keys: an odd number of cache lines, or few sets have them.
static const int LINE = ROWS + LANES;

static thread_local Room room;

// Rows [low, high) of a unit.
struct Span {
  int low, high;
};

// Rows of a block from `row` on, and the rows of a unit that one of them, each of them, and row j sees.
struct Bunch {
  int row;
  Span any, every, own[BUNCH];
  float mine[BUNCH], theirs[BUNCH];  // of `Merging`
};

// Rows of one KV head: row r is query r / group and head r % group of its heads.
struct Block {
  const Prompt& call;
  int head, group, first, count, padded;
  float *queries, *sums, *peaks, *totals, *keys, *values, *scores;

  static int padded_rows(const Prompt& call) { return (call.block_rows + BUNCH - 1) / BUNCH * BUNCH; }
  static size_t bytes(int rows) {
    return (rows * (2 * WIDTH + 2) + WIDTH * (LINE + ROWS) + BUNCH * ROWS) * sizeof(float);
  }

  Block(const Prompt& given, int kv_head, int block, float* memory)
      : call(given), head(kv_head), group(given.query_heads / given.kv_heads) {
    first = block * call.block_rows;
    count = std::min(call.block_rows, call.query_count * group - first);
    padded = (count + BUNCH - 1) / BUNCH * BUNCH;
    queries = memory;
    sums = queries + padded_rows(call) * WIDTH;
    keys = sums + padded_rows(call) * WIDTH;
    values = keys + WIDTH * LINE;
    scores = values + WIDTH * ROWS;
    peaks = scores + BUNCH * ROWS;
    totals = peaks + padded_rows(call);
  }

  // Where row `row` is in the caller's tensors of [T, n_q].
  int64_t place(int row) const {
    const int place = first + row;
    return (int64_t)(place / group) * call.query_heads + head * group + place % group;
  }
  int64_t position(int row) const { return call.query_position + (first + row) / group; }

  void begin() {
    memset(queries, 0, (size_t)padded * WIDTH * sizeof(float));
    memset(sums, 0, (size_t)padded * WIDTH * sizeof(float));
    for (int row = 0; row < count; row++) {
      const Element* query = call.queries + place(row) * HEAD_DIM;
      for (int i = 0; i < VECTORS; i++)
        store(queries + row * WIDTH + i * LANES, load_part(query, i) * call.scale);
      peaks[row] = call.sums ? call.peaks[place(row)] : LEAST;
      totals[row] = call.sums ? call.totals[place(row)] : 0;
      if (call.sums)
        memcpy(sums + row * WIDTH, call.sums + place(row) * HEAD_DIM, HEAD_DIM * sizeof(float));
    }
  }

  void end() {
    for (int row = 0; row < count; row++) {
      if (call.sums) {
        memcpy(call.sums + place(row) * HEAD_DIM, sums + row * WIDTH, HEAD_DIM * sizeof(float));
        call.peaks[place(row)] = peaks[row];
        call.totals[place(row)] = totals[row];
      }
      if (call.attended) {
        Element* to = call.attended + place(row) * HEAD_DIM;
        for (int i = 0; i < VECTORS; i++)
          store_part(to, i, load(sums + row * WIDTH + i * LANES) / totals[row]);
      }
    }
  }

  // Attends the rows [start, start + ROWS) of a page, as far as some query sees them.
  void attend(int page, int start) {
    const int64_t position_of_unit = call.page_position + (int64_t)page * call.page_tokens + start;
    const int rows = std::min(ROWS, call.page_tokens - start);
    const Span any = seen(0, count, position_of_unit, rows);
    if (any.low >= any.high) return;
    const int64_t number = call.pages[page];
    const int low = any.low / LANES * LANES, high = any.high;
    transpose(call.keys + number * call.key_page + head * call.key_head + (int64_t)start * HEAD_DIM,
              low, high);
    widen(call.values + number * call.value_page + head * call.value_head +
              (int64_t)start * HEAD_DIM,
          low, high);
    for (int row = 0; row < count; row += BUNCH) attend_bunch(row, position_of_unit, rows);
  }

  // The rows of a unit that any of the block's rows [from, to) sees.
  Span seen(int from, int to, int64_t unit, int rows) const {
    const int64_t behind = position(to - 1) + 1, low = position(from) + 1 - call.window;
    const auto in_unit = [&](int64_t position) { return (int)std::clamp<int64_t>(position - unit, 0, rows); };
    return {call.window ? in_unit(low) : 0, in_unit(behind)};
  }

  // Keys as [d, LINE]; rows behind the last one are 0.
  void transpose(const Element* from, int low, int high) {
#if NARROW
    for (int row = low; row < (high + LANES - 1) / LANES * LANES; row += 8)
      for (int i = 0; i < VECTORS; i++) {
        Vector lines[8];
        for (int lane = 0; lane < 8; lane++)
          lines[lane] = row + lane < high ? part_of(from + (int64_t)(row + lane) * HEAD_DIM, i) : Vector{};
        float* to = keys + i * LANES * LINE + row;
        turn(to, {lines[0].low, lines[1].low, lines[2].low, lines[3].low, lines[4].low, lines[5].low, lines[6].low,
                  lines[7].low});
        turn(to + 8 * LINE, {lines[0].high, lines[1].high, lines[2].high, lines[3].high, lines[4].high,
                             lines[5].high, lines[6].high, lines[7].high});
      }
#else
    for (int row = low; row < high; row += LANES)
      for (int i = 0; i < VECTORS; i++) {
        Floats lines[LANES], next[LANES];
        for (int lane = 0; lane < LANES; lane++)
          lines[lane] = row + lane < high ? load_part(from + (int64_t)(row + lane) * HEAD_DIM, i)
                                          : Floats{};
        for (int step = 0; step < 4; step++) {
          for (int j = 0; j < LANES / 2; j++) {
            const Floats a = lines[j], b = lines[j + LANES / 2];
            next[2 * j] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                                  22, 7, 23);
            next[2 * j + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                                      29, 14, 30, 15, 31);
          }
          memcpy(lines, next, sizeof lines);
        }
        for (int lane = 0; lane < LANES; lane++)
          store(keys + (i * LANES + lane) * LINE + row, lines[lane]);
      }
#endif
  }

#if NARROW
  // Writes 8 rows of 8 floats as lines that are LINE apart.
  static inline void turn(float* to, const __m256 (&rows)[8]) {
    __m256 pairs[8], fours[8];
    for (int i = 0; i < 4; i++) {
      pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
      pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 8; i++) {
      const __m256 a = pairs[i / 4 * 4 + i % 4 / 2], b = pairs[i / 4 * 4 + i % 4 / 2 + 2];
      fours[i] = i % 2 ? _mm256_shuffle_ps(a, b, 0xee) : _mm256_shuffle_ps(a, b, 0x44);
    }
    for (int i = 0; i < 4; i++) {
      _mm256_storeu_ps(to + i * LINE, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
      _mm256_storeu_ps(to + (i + 4) * LINE, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
  }
#endif

  void widen(const Element* from, int low, int high) {
    for (int row = low; row < high; row++)
      for (int i = 0; i < VECTORS; i++)
        store(values + row * WIDTH + i * LANES, part_of(from + (int64_t)row * HEAD_DIM, i));
  }

  void attend_bunch(int row, int64_t unit, int rows) {
    Bunch bunch;
    const Span any = seen(row, std::min(row + BUNCH, count), unit, rows);
    if (any.low >= any.high) return;
    bunch.row = row;
    bunch.any = bunch.every = any;
    const int start = any.low / LANES * LANES, end = (any.high + LANES - 1) / LANES * LANES;
    int vector = start;
    for (; vector + PAIR * LANES <= end; vector += PAIR * LANES) score_bunch<PAIR>(row, vector);
    for (; vector < end; vector += LANES) score_bunch<1>(row, vector);
    for (int j = 0; j < BUNCH; j++) {
      float* own = scores + j * ROWS;
      // Behind the block's last row there is none: what is computed for it is not read.
      const Span span = row + j < count ? seen(row + j, row + j + 1, unit, rows) : any;
      bunch.own[j] = span;
      bunch.every = {std::max(bunch.every.low, span.low), std::min(bunch.every.high, span.high)};
      if (row + j >= count || span.low >= span.high) {
        for (int i = start; i < end; i += LANES) store(own + i, Floats{});
        bunch.mine[j] = 1;
        bunch.theirs[j] = 0;
        continue;
      }
      if (call.cap != 0)
        for (int i = start; i < end; i += LANES) store(own + i, capped(load(own + i), call.cap));
      hide(own, span.low, span.high, start, end);
      float peak, total;
      weigh(own + start, end - start, peak, total);
      const Merging merging(peaks[row + j], totals[row + j], peak, total);
      peaks[row + j] = merging.peak;
      totals[row + j] = merging.total;
      bunch.mine[j] = merging.mine;
      bunch.theirs[j] = merging.theirs;
    }
    if (bunch.every.low >= bunch.every.high) bunch.every = {any.low, any.low};
    int i = 0;
    for (; i + BESIDE <= VECTORS; i += BESIDE) add_bunch<BESIDE>(bunch, i);
    for (; i < VECTORS; i++) add_bunch<1>(bunch, i);
  }

  // Scores of BUNCH rows with P vectors of keys. `sum`'s tree, without its shuffles: lane l of all
  // products is one chain, and the tree adds chains 8, 4, 2 and 1 apart.
  template <int P>
  inline void score_bunch(int row, int key) {
    Vector total[BUNCH][P];
    tree<P, LANES>(queries + row * WIDTH, keys + key, total);
    for (int j = 0; j < BUNCH; j++)
      for (int p = 0; p < P; p++) store(scores + j * ROWS + key + p * LANES, total[j][p]);
  }

  // Sums the chains l, l + STEP, l + 2 STEP ... of `query` and `key`, which begin at chain l.
  template <int P, int COUNT>
  static inline void tree(const float* query, const float* key, Vector (&total)[BUNCH][P]) {
    if constexpr (COUNT == 1) {
      for (int j = 0; j < BUNCH; j++)
        for (int p = 0; p < P; p++) total[j][p] = Vector{};
      for (int i = 0; i < VECTORS; i++) {
        Vector k[P];
        for (int p = 0; p < P; p++) k[p] = vector_of(key + i * LANES * LINE + p * LANES);
        for (int j = 0; j < BUNCH; j++)
          for (int p = 0; p < P; p++) total[j][p] = add_to(total[j][p], query[j * WIDTH + i * LANES], k[p]);
      }
    } else {
      Vector other[BUNCH][P];
      const int step = LANES / COUNT;
      tree<P, COUNT / 2>(query, key, total);
      tree<P, COUNT / 2>(query + step, key + step * LINE, other);
      for (int j = 0; j < BUNCH; j++)
        for (int p = 0; p < P; p++) total[j][p] = plus(total[j][p], other[j][p]);
    }
  }

  // Adds to N vectors of the sums of BUNCH rows those of their part.
  template <int N>
  inline void add_bunch(const Bunch& bunch, int vector) {
    Vector added[BUNCH][N] = {};
    add_values<false>({bunch.any.low, bunch.every.low}, bunch, vector, added);
    add_values<true>(bunch.every, bunch, vector, added);
    add_values<false>({bunch.every.high, bunch.any.high}, bunch, vector, added);
    for (int j = 0; j < BUNCH; j++)
      for (int i = 0; i < N; i++) {
        float* own = sums + (bunch.row + j) * WIDTH + (vector + i) * LANES;
        store(own, add_to(times(vector_of(own), bunch.mine[j]), bunch.theirs[j], added[j][i]));
      }
  }

  // A row that is not seen may be infinite or NaN: its weight, which is 0, would not hide it.
  template <bool EVERY, int N>
  inline void add_values(Span span, const Bunch& bunch, int vector, Vector (&added)[BUNCH][N]) {
    const float* value = values + span.low * WIDTH + vector * LANES;
    for (int k = span.low; k < span.high; k++, value += WIDTH)
      for (int i = 0; i < N; i++) {
        const Vector element = vector_of(value + i * LANES);
        for (int j = 0; j < BUNCH; j++)
          if (EVERY || (bunch.own[j].low <= k && k < bunch.own[j].high))
            added[j][i] = add_to(added[j][i], scores[j * ROWS + k], element);
      }
  }
};

// Returns 1 if there is no memory for a thread's block.
extern "C" int attend_prompt(const Prompt* given) {
  const Prompt& call = *given;
  const int rows = call.query_count * (call.query_heads / call.kv_heads);
  const int blocks = (rows + call.block_rows - 1) / call.block_rows;
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads) reduction(| : failed)
  for (int task = 0; task < blocks * call.kv_heads; task++) {
    float* memory = (float*)room.of(Block::bytes(Block::padded_rows(call)));
    if (!memory) {
      failed = 1;
      continue;
    }
    // The last blocks see the most keys: they come first.
    Block block(call, task % call.kv_heads, blocks - 1 - task / call.kv_heads, memory);
    block.begin();
    for (int page = 0; page < call.page_count; page++)
      for (int start = 0; start < call.page_tokens; start += ROWS) block.attend(page, start);
    block.end();
  }
  return failed;
}
