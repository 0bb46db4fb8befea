// Decode attention of a CPU that reads pages where they lie, by number: the kernel of paged_attention.py.
//
// The pages of each query are cut into spans; each span is attended by online softmax, and the spans of
// a query are merged in their order. A query's result therefore depends neither on the others nor
// on the count of threads. Sums are fp32. It is compiled for one HEAD_DIM and one ELEMENT.

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef float LooseFloats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(32), aligned(2), may_alias));

#if ELEMENT == FLOAT32
typedef float Element;
#else
typedef uint16_t Element;
#endif

static const int LANES = 16;
static const int VECTORS = (HEAD_DIM + LANES - 1) / LANES;
static const int REST = HEAD_DIM % LANES;
// Query heads of a block: their sums stay in registers.
static const int MOST_HEADS = VECTORS <= 4 ? 4 : VECTORS <= 8 ? 2 : 1;
// Rows of a page that are attended at once; their scores stay in the first cache.
static const int ROWS = 128;
static const float LEAST = -3.402823466e+38f;

static inline Floats load(const float* from) { return *(const LooseFloats*)from; }
static inline void store(float* to, Floats values) { *(LooseFloats*)to = values; }
static inline Floats all(float value) { return Floats{} + value; }

#if ELEMENT == BFLOAT16
static inline Floats load(const uint16_t* from) {
  return (Floats)(__builtin_convertvector(*(const LooseHalves*)from, Words) << 16);
}
#elif ELEMENT == FLOAT16
static inline Floats load(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  Floats values;
  for (int i = 0; i < LANES; i += 8) {
    const __m256 half = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i)));
    memcpy((float*)&values + i, &half, sizeof half);
  }
  return values;
#else
  Floats values;
  for (int i = 0; i < LANES; i++) {
    _Float16 half;
    memcpy(&half, from + i, sizeof half);
    values[i] = (float)half;
  }
  return values;
#endif
}
#endif

// Vector i of one row of HEAD_DIM elements; the last one may be short.
template <class T>
static inline Floats load_part(const T* row, int i) {
  if (REST == 0 || i < VECTORS - 1) return load(row + i * LANES);
  T rest[LANES] = {};
  memcpy(rest, row + i * LANES, REST * sizeof(T));
  return load(rest);
}

// The sum of all lanes, in a fixed order.
static inline float sum(Floats v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v[0];
}

// e^x for x <= 0, as Cephes' expf: within 2 units in the last place. 0 below -87; NaN stays NaN.
static inline Floats exponential(Floats x) {
  const Integers under = x < all(-87.0f);
  x = under ? all(-87.0f) : x;
  const Floats whole = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const Floats r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Floats y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  y = y * (Floats)((__builtin_convertvector(whole, Integers) + 127) << 23);
  return under ? Floats{} : y;
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

// Scores of H query heads with `count` consecutive keys, ROWS apart.
template <int H>
static inline void score(const Element* keys, const float* queries, int count, float* scores) {
  Floats query[H][VECTORS];
  for (int h = 0; h < H; h++)
    for (int i = 0; i < VECTORS; i++) query[h][i] = load(queries + (h * VECTORS + i) * LANES);
  for (int row = 0; row < count; row++, keys += HEAD_DIM) {
    Floats products[H];
    Floats key = load_part(keys, 0);
    for (int h = 0; h < H; h++) products[h] = key * query[h][0];
    for (int i = 1; i < VECTORS; i++) {
      key = load_part(keys, i);
      for (int h = 0; h < H; h++) products[h] += key * query[h][i];
    }
    for (int h = 0; h < H; h++) scores[h * ROWS + row] = sum(products[h]);
  }
}

// Adds `count` consecutive values, by their weights, to the sums of H heads.
template <int H>
static inline void add_values(const Element* values, const float* weights, int count, float* sums) {
  Floats added[H][VECTORS];
  for (int h = 0; h < H; h++)
    for (int i = 0; i < VECTORS; i++) added[h][i] = load(sums + (h * VECTORS + i) * LANES);
  for (int row = 0; row < count; row++, values += HEAD_DIM)
    for (int i = 0; i < VECTORS; i++) {
      const Floats value = load_part(values, i);
      for (int h = 0; h < H; h++) added[h][i] += value * weights[h * ROWS + row];
    }
  for (int h = 0; h < H; h++)
    for (int i = 0; i < VECTORS; i++) store(sums + (h * VECTORS + i) * LANES, added[h][i]);
}

// What the kernel is called with; paged_attention.py has the same structure.
struct Call {
  const Element *queries, *keys, *values;
  const int32_t *pages, *lows, *highs, *starts, *owners, *firsts, *order, *groups;
  // Of spans, then of queries: sums [., n_q, padded d], peaks and totals [., n_q].
  float *part_sums, *part_peaks, *part_totals;
  float *sums, *peaks, *totals;
  // Elements between pages, and between heads, of keys and of values.
  int64_t key_page, key_head, value_page, value_head;
  int32_t group_count, query_count, query_heads, kv_heads, threads;
  float scale, cap;  // 0: no cap
};

static const int WIDTH = VECTORS * LANES;

// Attends span `n` with query heads [first, first + H), which share KV head `head`.
template <int H>
static void attend_heads(const Call& call, int n, int head, int first) {
  alignas(64) float queries[H * WIDTH], sums[H * WIDTH] = {}, scores[H * ROWS];
  float peaks[H], totals[H];
  const Element* row = call.queries + ((int64_t)call.owners[n] * call.query_heads + first) * HEAD_DIM;
  for (int h = 0; h < H; h++, row += HEAD_DIM) {
    for (int i = 0; i < VECTORS; i++)
      store(queries + (h * VECTORS + i) * LANES, load_part(row, i) * call.scale);
    peaks[h] = LEAST;
    totals[h] = 0;
  }
  for (int entry = call.starts[n]; entry < call.starts[n + 1]; entry++) {
    const Element* keys = call.keys + call.pages[entry] * call.key_page + head * call.key_head;
    const Element* values = call.values + call.pages[entry] * call.value_page + head * call.value_head;
    for (int low = call.lows[entry]; low < call.highs[entry]; low += ROWS) {
      const int count = std::min(ROWS, call.highs[entry] - low);
      const int padded = (count + LANES - 1) / LANES * LANES;
      score<H>(keys + (int64_t)low * HEAD_DIM, queries, count, scores);
      for (int h = 0; h < H; h++) {
        float* own = scores + h * ROWS;
        if (call.cap != 0)
          for (int i = 0; i < count; i += LANES) store(own + i, capped(load(own + i), call.cap));
        for (int i = count; i < padded; i++) own[i] = LEAST;
        Floats most = load(own);
        for (int i = LANES; i < padded; i += LANES) {
          const Floats next = load(own + i);
          most = next > most ? next : most;
        }
        float peak = peaks[h];
        for (int i = 0; i < LANES; i++) peak = std::max(peak, (float)most[i]);
        const float shrink = exponential(peaks[h] - peak);
        Floats total = {};
        for (int i = 0; i < padded; i += LANES) {
          Floats weights = exponential(load(own + i) - peak);
          store(own + i, weights);
          total += weights;
        }
        totals[h] = totals[h] * shrink + sum(total);
        peaks[h] = peak;
        for (int i = 0; i < WIDTH; i += LANES)
          store(sums + h * WIDTH + i, load(sums + h * WIDTH + i) * shrink);
      }
      add_values<H>(values + (int64_t)low * HEAD_DIM, scores, count, sums);
    }
  }
  const int64_t place = (int64_t)n * call.query_heads + first;
  memcpy(call.part_sums + place * WIDTH, sums, sizeof sums);
  memcpy(call.part_peaks + place, peaks, sizeof peaks);
  memcpy(call.part_totals + place, totals, sizeof totals);
}

static void attend_span(const Call& call, int n, int head) {
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

static void merge(const Call& call, int query, int head) {
  const int first = call.firsts[query], last = call.firsts[query + 1];
  float peak = LEAST, total = 0;
  for (int n = first; n < last; n++)
    peak = std::max(peak, call.part_peaks[(int64_t)n * call.query_heads + head]);
  Floats sums[VECTORS] = {};
  for (int n = first; n < last; n++) {
    const int64_t place = (int64_t)n * call.query_heads + head;
    const float weight = exponential(call.part_peaks[place] - peak);
    total += weight * call.part_totals[place];
    for (int i = 0; i < VECTORS; i++)
      sums[i] += load(call.part_sums + place * WIDTH + i * LANES) * weight;
  }
  const int64_t row = (int64_t)query * call.query_heads + head;
  memcpy(call.sums + row * HEAD_DIM, sums, HEAD_DIM * sizeof(float));
  call.peaks[row] = peak;
  call.totals[row] = total;
}

// Spans order[groups[i]] ... order[groups[i + 1] - 1] begin at the same page: one thread attends
// them one after the other, so that it reads the page's rows from memory once.
extern "C" void attend_spans(const Call* given) {
  const Call& call = *given;
#pragma omp parallel num_threads(call.threads)
  {
#pragma omp for schedule(dynamic, 2)
    for (int task = 0; task < call.group_count * call.kv_heads; task++) {
      const int group = task / call.kv_heads, head = task % call.kv_heads;
      for (int i = call.groups[group]; i < call.groups[group + 1]; i++)
        attend_span(call, call.order[i], head);
    }
#pragma omp for schedule(static)
    for (int row = 0; row < call.query_count * call.query_heads; row++)
      merge(call, row / call.query_heads, row % call.query_heads);
  }
}
