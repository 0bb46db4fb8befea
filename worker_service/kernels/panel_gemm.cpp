// Products of rows with a matrix that lies in panels, and experts made of them: the kernels of panel_gemm.py.
//
// A panel holds VECTORS x 16 output columns (the last one fewer), for each input the weights of all
// its columns side by side. Each output is one chain of fused multiply-adds over the inputs in
// ascending order, in fp32: it depends on its own row and column only, not on the count of rows,
// on how rows are blocked, or on the threads. It is compiled for one ELEMENT (of rows and
// outputs) and one WEIGHT. int8 codes are multiplied as they are, without rounding, and each
// sum is scaled at its end.
//
// int4: codes from 0 to 15 stand for scale * (code - zero), with a scale and a zero for each column
// and `group` inputs. Each group is such a chain over the codes, that begins with what the zeros
// take from it; sums are scaled and added group by group.
//
// MXFP4: codes stand for one of 16 numbers, and a byte for a scale of each column and group, a power of 2
// (OCP Microscaling Formats 1.0, 5.1 and 5.3.3). All else is as of int4, without zeros.

#include "row_wise.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#define SAME 0
#define INT8 1
#define INT4 2
#define MXFP4 3
#define IN_GROUPS (WEIGHT >= INT4)

// Weights of two inputs in one word, for an instruction that multiplies and adds both.
#if ELEMENT == BFLOAT16 && defined(__AVX512BF16__) && !IN_GROUPS
#define PAIRS 1
static const int PAIR = 2;
typedef int32_t Input;
typedef __m512bh Column;
#else
#define PAIRS 0
static const int PAIR = 1;
typedef float Input;
typedef Vector Column;
#endif

// Unpacked: what codes are turned into for many rows.
#if WEIGHT == SAME
typedef Element Weight;
typedef Element Unpacked;
#else
typedef int8_t Weight;
#if PAIRS
typedef uint16_t Unpacked;
#else
typedef float Unpacked;
#endif
#endif

// Sums of ROWS x VECTORS vectors stay in registers: of 512 bits there are 32, of 256 half as many. With one row, sums
// of several panels are under way at once, or each would wait for its last product: codes of 4 bits need more of them.
#if defined(__AVX512F__)
static const int VECTORS = 3, ROWS = 8, AT_ONCE = 1;
#else
static const int VECTORS = 1, ROWS = 6, AT_ONCE = WEIGHT == MXFP4 ? 1 : WEIGHT == INT4 ? 2 : 4;
#endif
static const int COLUMNS = VECTORS * LANES;
// Bytes ahead of the weights that are read; enough for the memory, measured.
static const int AHEAD = 2048;
// Inputs that one thread packs at once, rows that a task has at least, and blocks of rows for
// which codes are unpacked once instead of for each of them.
static const int64_t PACKED_INPUTS = 256, TASK_ROWS = 64, UNPACKED_BLOCKS = 3;
// Inputs that one thread packs before the others begin: they would be as long in waking.
static const int64_t PACKED_ALONE = 16384;

// The last two: x / (1 + e^-alpha x) of x up to a limit, and x up to limits, plus an offset, times the other tensor.
enum Operation { NONE, RELU, SILU, GELU_TANH, ADD, MULTIPLY, CLAMPED_SILU, CLAMPED_MULTIPLY };

// What the kernel is called with; panel_gemm.py has the same structure.
struct Call {
  const Element* rows;
  const int64_t* places;  // of the rows; null: one after the other
  const Weight* weights;
  const float* scales;  // of each column; null: 1, or within the panels
  const Element *bias, *other;
  Element* outputs;
  Input* packed;      // room for the rows
  float* group_sums;  // of inputs, of each row and group; int4 only
  int64_t row_stride, other_stride, output_stride, row_count, in_features, out_features, group;
  int32_t operation, threads;
  float alpha, limit, offset;
};

static inline int64_t packed_depth(int64_t in_features) { return (in_features + PAIR - 1) / PAIR; }
static inline int64_t block_count(const Call& call) { return (call.row_count + ROWS - 1) / ROWS; }
// All blocks have as many rows, but the last one: a block of one or two waits for each of its products.
static inline int64_t block_rows(const Call& call) {
  return (call.row_count + block_count(call) - 1) / block_count(call);
}
static inline int64_t panel_count(const Call& call) { return (call.out_features + COLUMNS - 1) / COLUMNS; }
static inline int64_t group_count(const Call& call) {
  return call.group ? (call.in_features + call.group - 1) / call.group : 0;
}

static inline float element(const Element* from) {
#if ELEMENT == FLOAT32
  return *from;
#elif ELEMENT == BFLOAT16
  const uint32_t bits = (uint32_t)*from << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
#else
  Element padded[LANES] = {*from};
  return load(padded)[0];
#endif
}

static inline Input input_of(const Call& call, const Element* row, int64_t k) {
#if PAIRS
  const uint32_t low = row[2 * k];
  const uint32_t high = 2 * k + 1 < call.in_features ? row[2 * k + 1] : 0;
  return (Input)(low | high << 16);
#else
  return element(row + k);
#endif
}

// Packs inputs [first, last) of a block of rows, with int4 a group: those of one input side by side.
static void pack(const Call& call, int64_t block, int64_t first, int64_t last) {
  const int64_t depth = packed_depth(call.in_features);
  const int64_t begin = block * block_rows(call);
  const int count = (int)std::min(block_rows(call), call.row_count - begin);
  Input* to = call.packed + begin * depth;
  for (int r = 0; r < count; r++) {
    const int64_t place = begin + r;
    const Element* row = call.rows + (call.places ? call.places[place] : place) * call.row_stride;
    // One row in a loop of its own, which compilers make vectors of.
    if (count == 1)
      for (int64_t k = first; k < last; k++) to[k] = input_of(call, row, k);
    else
      for (int64_t k = first; k < last; k++) to[k * count + r] = input_of(call, row, k);
#if WEIGHT == INT4
    float sum = 0;
    for (int64_t k = first; k < last; k++) sum += to[k * count + r];
    call.group_sums[place * group_count(call) + first / call.group] = sum;
#endif
  }
}

// Weights of a vector's columns, for one input or a pair.
#if PAIRS
static inline Column column_of(const uint16_t* from) { return (Column)_mm512_loadu_si512(from); }
static inline Column column_of(const int8_t* from) {
  // Integers up to 127 are exact in bfloat16.
  return _mm512_cvtne2ps_pbh((__m512)load(from + LANES), (__m512)load(from));
}
static inline Floats add_product(Input input, Column column, Floats sum) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(input), column);
}
static inline void store_column(uint16_t* to, Column column) { _mm512_storeu_si512(to, (__m512i)column); }
template <class W>
static inline Floats in_order(Floats sum) { return sum; }
#else
template <class W>
static inline Column column_of(const W* from) { return vector_of(from); }
// The columns of a sum in their order.
template <class W>
static inline Vector in_order(Vector sum) { return sum; }
#if NARROW && ELEMENT == BFLOAT16
// One load for both halves: columns 0, 2, 4 ... come first, then 1, 3, 5 ...
static inline Column column_of(const uint16_t* from) {
  const __m256i pairs = _mm256_loadu_si256((const __m256i*)from);
  return {(__m256)_mm256_slli_epi32(pairs, 16), (__m256)_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000))};
}
template <>
inline Vector in_order<uint16_t>(Vector sum) {
  const __m256 low = _mm256_unpacklo_ps(sum.low, sum.high), high = _mm256_unpackhi_ps(sum.low, sum.high);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
#endif
static inline Vector add_product(Input input, Column column, Vector sum) { return add_to(sum, input, column); }
static inline void store_column(float* to, Column column) { store(to, column); }
#endif

// What sums of some rows with a panel, or with several of them, are made of.
template <class W>
struct Terms {
  const Call& call;
  const Input* inputs;      // packed
  const float* group_sums;  // of the first row
  const Weight* panel;
  const W* columns;  // the panel's weights, unpacked or not
  int64_t distance;  // bytes from a panel to the next
};

#if IN_GROUPS
// As wide as a register: what is wider does not stay in registers.
#if defined(__AVX512F__)
static const int WIDTH = 16;
#elif defined(__AVX2__)
static const int WIDTH = 8;
#else
static const int WIDTH = 4;
#endif
static const int PARTS = LANES / WIDTH;
typedef float Part __attribute__((vector_size(4 * WIDTH)));
typedef int32_t PartIntegers __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t PartWords __attribute__((vector_size(4 * WIDTH)));
typedef float LoosePart __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t LooseWords __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));

#if WEIGHT == INT4
// Of each group and column: a scale and a zero.
static const int64_t SCALE_BYTES = sizeof(float) + 1;
static inline Part scales_of(const Weight* group, int part) { return ((const LoosePart*)group)[part]; }
// The numbers of which the codes of the i-th of 8 inputs are.
static inline Part numbers_of(PartWords words, int i) {
  return __builtin_convertvector((PartIntegers)(words >> 4 * i & 15), Part);
}
#else
// Of each group and column: the exponent of a scale, as that of an fp32; the lowest one is taken for 0.
static const int64_t SCALE_BYTES = 1;
static inline Part scales_of(const Weight* group, int part) {
  const Weight* from = group + part * WIDTH;
#if defined(__AVX512F__)
  return (Part)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)), 23);
#elif defined(__AVX2__)
  return (Part)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)), 23);
#else
  PartWords bits;
  for (int i = 0; i < WIDTH; i++) bits[i] = (uint32_t)(uint8_t)from[i] << 23;
  return (Part)bits;
#endif
}
static inline Part numbers_of(PartWords words, int i) {
#if defined(__AVX512F__)
  const __m512 numbers = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
  return (Part)_mm512_permutexvar_ps((__m512i)(words >> 4 * i), numbers);
#elif defined(__AVX2__)
  const __m256 sizes = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
  const PartWords size = (PartWords)_mm256_permutevar8x32_ps(sizes, (__m256i)(words >> 4 * i));
  return (Part)(size ^ (words << (28 - 4 * i) & 0x80000000u));
#else
  static const float sizes[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  Part numbers;
  for (int p = 0; p < WIDTH; p++) {
    const uint32_t code = words[p] >> 4 * i;
    numbers[p] = code & 8 ? -sizes[code & 7] : sizes[code & 7];
  }
  return numbers;
#endif
}
#endif

// Bytes of a panel for one column: of each group what scales it, and a word of codes for 8 inputs.
static inline int64_t group_bytes(int64_t inputs) { return SCALE_BYTES + inputs / 2; }
static inline int64_t column_bytes(const Call& call) {
  return group_count(call) * SCALE_BYTES + call.in_features / 2;
}

// Calls `with` with the numbers of each input of a group for P parts of columns, in order. G of the parts lie
// together, the next ones in the next panel.
template <int P, int G, class F>
static inline void for_each_input(const int8_t* codes, int64_t distance, int64_t count, F with) {
  for (int64_t k = 0; k < count; k += 8, codes += G * sizeof(Part)) {
    PartWords words[P];
    for (int p = 0; p < P; p++) {
      const int8_t* from = codes + p / G * distance + p % G * sizeof(Part);
      if (p % G * sizeof(Part) % 64 == 0) __builtin_prefetch(from + AHEAD, 0, 3);
      words[p] = *(const LooseWords*)from;
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      Part columns[P];
      for (int p = 0; p < P; p++) columns[p] = numbers_of(words[p], i);
      with(k + i, columns);
    }
  }
}
template <int P, int G, class F>
static inline void for_each_input(const float* columns, int64_t, int64_t count, F with) {
  for (int64_t k = 0; k < count; k++, columns += P * WIDTH) {
    Part parts[P];
    for (int p = 0; p < P; p++) parts[p] = *(const LoosePart*)(columns + p * WIDTH);
    with(k, parts);
  }
}

// Sums of R rows with V vectors of columns, T of them in each panel. Those of several panels are of one row.
template <int R, int V, int T, class W>
static inline void sum_up(const Terms<W>& terms, Floats (*sums)[VECTORS]) {
  constexpr int P = V * PARTS, G = T * PARTS;
  const int64_t groups = group_count(terms.call), group = terms.call.group;
  const Weight* panel = terms.panel;
  Part all_sums[R][P] = {};
  for (int64_t g = 0; g < groups; g++) {
    const int64_t count = std::min(group, terms.call.in_features - g * group);
    const Input* inputs = terms.inputs + g * group * R;
    const Weight* codes = panel + T * LANES * SCALE_BYTES;
    Part own[R][P] = {};
#if WEIGHT == INT4
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) {
        const Weight* zeros = panel + v / T * terms.distance + T * LANES * sizeof(float) + v % T * LANES;
        const Floats start = rounded(load(zeros) * -terms.group_sums[r * groups + g]);
        for (int p = 0; p < PARTS; p++) own[r][v * PARTS + p] = ((const LoosePart*)&start)[p];
      }
#endif
    const auto add = [&](int64_t k, const Part* columns) {
      for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) own[r][p] = columns[p] * inputs[k * R + r] + own[r][p];
    };
    if constexpr (sizeof(W) == 1)
      for_each_input<P, G>(codes, terms.distance, count, add);
    else
      for_each_input<P, G>(terms.columns + g * group * V * LANES, 0, count, add);
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) all_sums[r][p] += own[r][p] * scales_of(panel + p / G * terms.distance, p % G);
    panel += T * LANES * group_bytes(count);
  }
  // One by one: a whole array that is copied would be in memory all the time.
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) {
      const Part part = all_sums[r][p];
      memcpy((float*)sums[r + p / G] + p % G * WIDTH, &part, sizeof part);
    }
}
#else
static inline int64_t column_bytes(const Call& call) {
  return packed_depth(call.in_features) * PAIR * sizeof(Weight);
}

// Sums of R rows with V vectors of columns, T of them in each panel. Those of several panels are of one row.
template <int R, int V, int T, class W>
static inline void sum_up(const Terms<W>& terms, Floats (*sums)[VECTORS]) {
  const int64_t depth = packed_depth(terms.call.in_features);
  const Input* inputs = terms.inputs;
  const W* weights = terms.columns;
  Vector own[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) own[r][v] = Vector{};
  constexpr int64_t bytes = T * LANES * PAIR * sizeof(W), steps = bytes < 64 ? 64 / bytes : 1;
  const auto add = [&] {
    Column column[V];
    for (int v = 0; v < V; v++)
      column[v] = column_of((const W*)((const char*)weights + v / T * terms.distance) + v % T * LANES * PAIR);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) own[r][v] = add_product(inputs[r], column[v], own[r][v]);
    inputs += R;
    weights += T * LANES * PAIR;
  };
  int64_t k = 0;
  for (; k + steps <= depth; k += steps) {
    for (int v = 0; v < V; v += T)
      for (int64_t i = 0; i < bytes * steps; i += 64)
        __builtin_prefetch((const char*)weights + v / T * terms.distance + AHEAD + i, 0, 3);
    for (int i = 0; i < steps; i++) add();
  }
  for (; k < depth; k++) add();
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store((float*)&sums[r + v / T][v % T], in_order<W>(own[r][v]));
}
#endif

template <int R, int V, class W>
static void sum_rows(int rows, const Terms<W>& terms, Floats (*sums)[VECTORS]) {
  if (rows == R) return sum_up<R, V, V>(terms, sums);
  if constexpr (R > 1) sum_rows<R - 1, V>(rows, terms, sums);
}

template <int V, class W>
static void sum_columns(int vectors, int rows, const Terms<W>& terms, Floats (*sums)[VECTORS]) {
  if (vectors == V) return sum_rows<ROWS, V>(rows, terms, sums);
  if constexpr (V > 1) sum_columns<V - 1>(vectors, rows, terms, sums);
}

// 1 / (1 + e^-x)
static inline Floats logistic(Floats x) {
  const Integers negative = x < Floats{};
  const Floats decay = exponential(negative ? x : -x);
  return (negative ? decay : all(1.0f)) / (1.0f + decay);
}

// NaN stays NaN.
static inline Floats at_most(Floats x, float limit) { return x > all(limit) ? all(limit) : x; }
static inline Floats at_least(Floats x, float limit) { return x < all(limit) ? all(limit) : x; }

// One vector of outputs, from its sums, at `column` of `row`.
static inline Floats finish(const Call& call, Floats value, const float* scale, const Element* bias,
                            const Element* other) {
  if (scale) value *= load(scale);
  if (bias) value += load(bias);
  switch (call.operation) {
    case RELU: return value < Floats{} ? Floats{} : value;
    case SILU: return value * logistic(value);
    // x/2 (1 + tanh u) = x / (1 + e^-2u), with u = sqrt(2/pi) (x + 0.044715 x^3)
    case GELU_TANH: return value * logistic(value * (1.5957691216057308f + 0.07135481282553535f * value * value));
    case ADD: return value + load(other);
    case MULTIPLY: return value * load(other);
    case CLAMPED_SILU: value = at_most(value, call.limit); return value * logistic(call.alpha * value);
    case CLAMPED_MULTIPLY:
      return (at_least(at_most(value, call.limit), -call.limit) + call.offset) * load(other);
  }
  return value;
}

template <class T>
static inline const T* at(const T* from, int64_t offset) { return from ? from + offset : nullptr; }

static void write(const Call& call, int64_t row, int64_t column, Floats value) {
  const int count = (int)std::min<int64_t>(LANES, call.out_features - column);
  Element* to = call.outputs + row * call.output_stride + column;
  const Element* other = at(call.other, row * call.other_stride + column);
  if (count == LANES)
    return store(to, finish(call, value, at(call.scales, column), at(call.bias, column), other));
  float scale[LANES] = {};
  Element bias[LANES] = {}, others[LANES] = {}, outputs[LANES];
  if (call.scales) memcpy(scale, call.scales + column, count * sizeof(float));
  if (call.bias) memcpy(bias, call.bias + column, count * sizeof(Element));
  if (other) memcpy(others, other, count * sizeof(Element));
  store(outputs, finish(call, value, call.scales ? scale : nullptr, call.bias ? bias : nullptr, others));
  memcpy(to, outputs, count * sizeof(Element));
}

// The vectors of a panel, and where it begins.
struct Panel {
  int64_t column;
  int vectors;
  const Weight* weights;
};

static Panel panel_of(const Call& call, int64_t index) {
  const int64_t column = index * COLUMNS;
  const int vectors = (int)std::min<int64_t>(VECTORS, (call.out_features - column + LANES - 1) / LANES);
  return {column, vectors, (const Weight*)((const char*)call.weights + column * column_bytes(call))};
}

template <class W>
static void multiply_blocks(const Call& call, const Panel& panel, const W* columns, int64_t first, int64_t last) {
  for (int64_t block = first; block < last; block++) {
    const int64_t row = block * block_rows(call);
    const int rows = (int)std::min(block_rows(call), call.row_count - row);
    Floats sums[ROWS][VECTORS];
    const Input* inputs = call.packed + row * packed_depth(call.in_features);
    const Terms<W> terms = {call, inputs, at(call.group_sums, row * group_count(call)), panel.weights, columns, 0};
    sum_columns<VECTORS>(panel.vectors, rows, terms, sums);
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < panel.vectors; v++) write(call, row + r, panel.column + v * LANES, sums[r][v]);
  }
}

#if WEIGHT == INT8
static void unpack(const Call& call, const Panel& panel, Unpacked* to) {
  const int64_t width = LANES * PAIR, count = packed_depth(call.in_features) * panel.vectors;
  for (int64_t i = 0; i < count; i++) store_column(to + i * width, column_of(panel.weights + i * width));
}
#elif IN_GROUPS
template <int V>
static void unpack(const Call& call, const Panel& panel, Unpacked* to) {
  if constexpr (V > 1) {
    if (panel.vectors < V) return unpack<V - 1>(call, panel, to);
  }
  constexpr int P = V * PARTS;
  const Weight* from = panel.weights;
  for (int64_t first = 0; first < call.in_features; first += call.group) {
    const int64_t count = std::min(call.group, call.in_features - first);
    for_each_input<P, P>(from + V * LANES * SCALE_BYTES, 0, count, [&](int64_t k, const Part* columns) {
      memcpy(to + (first + k) * V * LANES, columns, V * LANES * sizeof(float));
    });
    from += V * LANES * group_bytes(count);
  }
}
static void unpack(const Call& call, const Panel& panel, Unpacked* to) { unpack<VECTORS>(call, panel, to); }
#endif

// Multiplies blocks [first, last) of rows with AT_ONCE panels from `index` on, if there are as many.
static void multiply_panels(const Call& call, int64_t index, int64_t first, int64_t last, Unpacked* unpacked) {
  const int64_t end = std::min(index + AT_ONCE, panel_count(call));
  if constexpr (AT_ONCE > 1 && VECTORS == 1) {
    if (call.row_count == 1 && first < last && end == index + AT_ONCE) {
      const Panel panel = panel_of(call, index);
      Floats sums[AT_ONCE][VECTORS];
      const int64_t distance = COLUMNS * column_bytes(call);
      const Terms<Weight> terms = {call, call.packed, call.group_sums, panel.weights, panel.weights, distance};
      sum_up<1, AT_ONCE, 1>(terms, sums);
      for (int v = 0; v < AT_ONCE; v++) write(call, 0, panel.column + v * LANES, sums[v][0]);
      return;
    }
  }
  for (; index < end; index++) {
    const Panel panel = panel_of(call, index);
#if WEIGHT != SAME
    if (last - first >= UNPACKED_BLOCKS) {
      unpack(call, panel, unpacked);
      multiply_blocks<Unpacked>(call, panel, unpacked, first, last);
      continue;
    }
#endif
    multiply_blocks(call, panel, panel.weights, first, last);
  }
}

// What follows is called by all threads of a team. Calls have matrices of one shape.

static void pack_all(const Call* calls, int64_t count) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; i++) blocks = std::max(blocks, block_count(calls[i]));
  const int64_t depth = packed_depth(calls->in_features), slice = WEIGHT == INT4 ? calls->group : PACKED_INPUTS;
  const int64_t slices = (depth + slice - 1) / slice;
#pragma omp for schedule(static)
  for (int64_t task = 0; task < count * blocks * slices; task++) {
    const Call& call = calls[task / (blocks * slices)];
    const int64_t block = task / slices % blocks, first = task % slices * slice;
    if (block < block_count(call)) pack(call, block, first, std::min(depth, first + slice));
  }
}

// Multiplies what is packed, then the same with the matrices of `next`, if there are any: they may need the outputs of
// the same columns. Threads do not wait for each other at its end. Returns 1, and outputs are not whole, if there is no
// memory for what a thread unpacks.
static int32_t multiply_all(const Call* calls, const Call* next, int64_t count) {
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) rows = std::max(rows, calls[i].row_count);
  const int64_t groups = (panel_count(*calls) + AT_ONCE - 1) / AT_ONCE, tasks = count * groups;
  // Rows are divided, too, where panels alone would leave threads without work.
  const int64_t wanted = (4 * calls->threads + tasks - 1) / tasks, most = (rows + TASK_ROWS - 1) / TASK_ROWS;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, most));
  const bool unpacks = WEIGHT != SAME && (rows + ROWS - 1) / ROWS >= UNPACKED_BLOCKS;
  const std::unique_ptr<Unpacked[]> unpacked(
      unpacks ? new (std::nothrow) Unpacked[COLUMNS * packed_depth(calls->in_features) * PAIR] : nullptr);
  const int32_t failed = unpacks && !unpacked;
#pragma omp for schedule(dynamic) nowait
  for (int64_t task = 0; task < tasks * parts; task++) {
    if (failed) continue;
    const int64_t which = task / parts / groups, index = task / parts % groups * AT_ONCE, part = task % parts;
    const int64_t blocks = block_count(calls[which]), first = blocks * part / parts, last = blocks * (part + 1) / parts;
    multiply_panels(calls[which], index, first, last, unpacked.get());
    if (next) multiply_panels(next[which], index, first, last, unpacked.get());
  }
  return failed;
}

// The columns of a panel, and the inputs whose weights lie side by side.
extern "C" int32_t panel_columns() { return COLUMNS; }
extern "C" int32_t panel_pair() { return PAIR; }

// Bytes that a thread keeps for its next call; what a prompt needs is given back.
static const size_t KEPT_BYTES = 8 << 20;
static thread_local Room own_room;

// Returns 1, and outputs are not whole, if there is no memory for what it needs beside them.
extern "C" int32_t multiply(Call* call) {
  const size_t size = call->row_count * packed_depth(call->in_features) * sizeof(Input);
  char* memory = (char*)own_room.of(size + call->row_count * group_count(*call) * sizeof(float));
  if (!memory) return 1;
  call->packed = (Input*)memory;
  call->group_sums = (float*)(memory + size);
  const bool is_small = call->row_count * call->in_features <= PACKED_ALONE;
  if (is_small) pack_all(call, 1);
  int32_t failed = 0;
#pragma omp parallel num_threads(call->threads) reduction(| : failed)
  {
    if (!is_small) pack_all(call, 1);
    failed = multiply_all(call, nullptr, 1);
  }
  if (own_room.size > KEPT_BYTES) own_room.give_back();
  return failed;
}

#include "layer.h"

// What experts are called with: tables have the panels of each expert; panel_gemm.py has the same structure.
struct Experts {
  const Element* rows;
  const int64_t* chosen;  // of each row
  const float* shares;    // of each of them
  const Weight *const *gates, *const *ups, *const *downs;  // no gates: null
  const Element *gate_bias, *up_bias, *down_bias;          // of each expert; null: none
  Element* outputs;
  int64_t row_stride, row_count, each, experts, in_features, inner_features, group, inner_group;
  int32_t first_operation, second_operation, threads;  // of gates and ups, or of ups and none
  float alpha, limit, offset;
};

// The product with one expert's matrix of some of the pairs, without rows and outputs.
static Call product_of(const Experts& all, const Weight* const* panels, const Element* bias, int64_t expert,
                       bool is_down) {
  Call call = {};
  call.in_features = is_down ? all.inner_features : all.in_features;
  call.out_features = is_down ? all.in_features : all.inner_features;
  call.group = is_down ? all.inner_group : all.group;
  call.row_stride = call.in_features;
  call.other_stride = call.output_stride = call.out_features;
  call.weights = panels[expert];
#if WEIGHT == INT8
  const int64_t columns = (call.out_features + LANES - 1) / LANES * LANES;
  call.scales = (const float*)(call.weights + columns * column_bytes(call));
#endif
  call.bias = at(bias, expert * call.out_features);
  call.threads = all.threads;
  call.alpha = all.alpha;
  call.limit = all.limit;
  call.offset = all.offset;
  return call;
}

// Adds the results of a row's experts at a vector of columns, in the row's own order.
static void add_up(const Experts& all, const Element* found, const int64_t* spots, int64_t row, int64_t column) {
  const size_t size = std::min<int64_t>(LANES, all.in_features - column) * sizeof(Element);
  Floats total = {};
  Element part[LANES] = {};
  for (int64_t pair = row * all.each; pair < (row + 1) * all.each; pair++) {
    memcpy(part, found + spots[pair] * all.in_features + column, size);
    total = multiply_add(load(part), Floats{} + all.shares[pair], total);
  }
  store(part, total);
  memcpy(all.outputs + row * all.in_features + column, part, size);
}

// Each row through its experts: down(operation(gate(row)) * up(row)), by its shares. Each chosen expert's weights are
// read once. Returns 1, and outputs are not whole, if there is no memory; 2 if there is no such expert.
extern "C" int32_t experts(const Experts* given) try {
  const Experts& all = *given;
  const int64_t pairs = all.row_count * all.each;
  // Pairs of a row and one of its experts, in the order of experts: the row of each, and where a pair has gone.
  std::vector<int64_t> firsts(all.experts + 1), rows(pairs), spots(pairs);
  for (int64_t pair = 0; pair < pairs; pair++) {
    if (all.chosen[pair] < 0 || all.chosen[pair] >= all.experts) return 2;
    firsts[all.chosen[pair] + 1]++;
  }
  for (int64_t expert = 0; expert < all.experts; expert++) firsts[expert + 1] += firsts[expert];
  std::vector<int64_t> next(firsts);
  for (int64_t pair = 0; pair < pairs; pair++) {
    spots[pair] = next[all.chosen[pair]]++;
    rows[spots[pair]] = pair / all.each;
  }
  const int64_t depth = packed_depth(std::max(all.in_features, all.inner_features));
  const std::unique_ptr<Input[]> packed(new Input[pairs * depth]);
  const std::unique_ptr<Element[]> inner(new Element[pairs * all.inner_features]);
  const std::unique_ptr<Element[]> found(new Element[pairs * all.in_features]);
  std::vector<float> sums(WEIGHT == INT4 ? pairs * depth / 8 : 0);
  std::vector<Call> gates, ups, downs;
  for (int64_t expert = 0; expert < all.experts; expert++) {
    const int64_t first = firsts[expert];
    if (first == firsts[expert + 1]) continue;
    const auto add = [&](std::vector<Call>& calls, Call call, int32_t operation) {
      call.row_count = firsts[expert + 1] - first;
      call.packed = packed.get() + first * packed_depth(call.in_features);
      if (WEIGHT == INT4) call.group_sums = sums.data() + first * group_count(call);
      call.operation = operation;
      calls.push_back(call);
    };
    for (const bool is_gate : {true, false}) {
      if (is_gate && !all.gates) continue;
      Call call = product_of(all, is_gate ? all.gates : all.ups, is_gate ? all.gate_bias : all.up_bias, expert, false);
      call.rows = all.rows;
      call.row_stride = all.row_stride;
      call.places = rows.data() + first;
      call.outputs = inner.get() + first * all.inner_features;
      call.other = is_gate || !all.gates ? nullptr : call.outputs;
      add(is_gate ? gates : ups, call, is_gate || !all.gates ? all.first_operation : all.second_operation);
    }
    Call call = product_of(all, all.downs, all.down_bias, expert, true);
    call.rows = inner.get() + first * all.inner_features;
    call.outputs = found.get() + first * all.in_features;
    add(downs, call, NONE);
  }
  const int64_t vectors = (all.in_features + LANES - 1) / LANES, count = (int64_t)ups.size();
  const bool is_small = pairs * all.in_features <= PACKED_ALONE;
  if (is_small) pack_all(ups.data(), count);
  int32_t failed = 0;
#pragma omp parallel num_threads(all.threads) reduction(| : failed)
  {
    if (!is_small) pack_all(ups.data(), count);
    failed = all.gates ? multiply_all(gates.data(), ups.data(), count) : multiply_all(ups.data(), nullptr, count);
#pragma omp barrier
    pack_all(downs.data(), count);
    failed |= multiply_all(downs.data(), nullptr, count);
#pragma omp barrier
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < all.row_count * vectors; task++)
      add_up(all, found.get(), spots.data(), task / vectors, task % vectors * LANES);
  }
  return failed;
} catch (const std::bad_alloc&) {
  return 1;
}
