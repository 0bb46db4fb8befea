// Products of rows with a matrix that lies in panels: the kernel of panel_gemm.py.
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

#include "vectors.h"

#include <algorithm>
#include <memory>
#include <new>

#define SAME 0
#define INT8 1
#define INT4 2

// What registers hold of a panel's columns: compilers keep vectors of 64 bytes in memory where registers have 32.
#if !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
struct Vector {
  __m256 low, high;
};
static inline Vector vector_of(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline __m256 half_of(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
static inline __m256 half_of(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128((const __m128i*)from);
#if ELEMENT == FLOAT16
  return _mm256_cvtph_ps(halves);
#else
  return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#endif
}
template <class W>
static inline Vector vector_of(const W* from) { return {half_of(from), half_of(from + 8)}; }
static inline Vector add_to(Vector sum, float input, Vector column) {
  const __m256 factor = _mm256_set1_ps(input);
  return {_mm256_fmadd_ps(factor, column.low, sum.low), _mm256_fmadd_ps(factor, column.high, sum.high)};
}
static inline void store(float* to, Vector values) {
  // Or GCC keeps the first of them in memory while int8 is read, which could be anything's bytes.
  asm("" : "+x"(values.low), "+x"(values.high));
  _mm256_storeu_ps(to, values.low);
  _mm256_storeu_ps(to + 8, values.high);
}
#else
typedef Floats Vector;
template <class W>
static inline Vector vector_of(const W* from) { return load(from); }
static inline Vector add_to(Vector sum, float input, Vector column) { return multiply_add(all(input), column, sum); }
#endif

// Weights of two inputs in one word, for an instruction that multiplies and adds both.
#if ELEMENT == BFLOAT16 && defined(__AVX512BF16__) && WEIGHT != INT4
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

// Sums of ROWS x VECTORS vectors stay in registers: of 512 bits there are 32, of 256 half as many.
#if defined(__AVX512F__)
static const int VECTORS = 3, ROWS = 8;
#else
static const int VECTORS = 1, ROWS = 6;
#endif
static const int COLUMNS = VECTORS * LANES;
// Bytes ahead of the weights that are read; enough for the memory, measured.
static const int AHEAD = 2048;
// Inputs that one thread packs at once, rows that a task has at least, and blocks of rows for
// which codes are unpacked once instead of for each of them.
static const int64_t PACKED_INPUTS = 256, TASK_ROWS = 64, UNPACKED_BLOCKS = 3;

enum Operation { NONE, RELU, SILU, GELU_TANH, ADD, MULTIPLY };

// What the kernel is called with; panel_gemm.py has the same structure.
struct Call {
  const Element* rows;
  const Weight* weights;
  const float* scales;  // of each column; null: 1, or within the panels
  const Element *bias, *other;
  Element* outputs;
  Input* packed;
  float* group_sums;  // of inputs, of each row and group; int4 only
  int64_t row_stride, other_stride, row_count, in_features, out_features, group;
  int32_t operation, threads;
};

static inline float element(const Element* from) {
#if ELEMENT == FLOAT32
  return *from;
#else
  Element padded[LANES] = {*from};
  return load(padded)[0];
#endif
}

// Packs inputs [first, last) of a block of rows, with int4 a group: those of one input side by side.
static void pack(const Call& call, int64_t block, int64_t first, int64_t last) {
  const int64_t depth = (call.in_features + PAIR - 1) / PAIR;
  const int count = (int)std::min<int64_t>(ROWS, call.row_count - block * ROWS);
  Input* to = call.packed + block * ROWS * depth;
  for (int r = 0; r < count; r++) {
    const Element* row = call.rows + (block * ROWS + r) * call.row_stride;
    for (int64_t k = first; k < last; k++) {
#if ELEMENT == BFLOAT16
      if (PAIR == 2) {
        const uint32_t low = row[2 * k];
        const uint32_t high = 2 * k + 1 < call.in_features ? row[2 * k + 1] : 0;
        to[k * count + r] = (Input)(low | high << 16);
        continue;
      }
#endif
      to[k * count + r] = (Input)element(row + k);
    }
#if WEIGHT == INT4
    float sum = 0;
    for (int64_t k = first; k < last; k++) sum += to[k * count + r];
    call.group_sums[(block * ROWS + r) * ((depth + call.group - 1) / call.group) + first / call.group] = sum;
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
#else
template <class W>
static inline Column column_of(const W* from) { return vector_of(from); }
static inline Vector add_product(Input input, Column column, Vector sum) { return add_to(sum, input, column); }
static inline void store_column(float* to, Column column) { store(to, column); }
#endif

// What sums of some rows with a panel are made of.
template <class W>
struct Terms {
  const Call& call;
  const Input* inputs;      // packed
  const float* group_sums;  // of the first row
  const Weight* panel;
  const W* columns;  // the panel's weights, unpacked or not
};

#if WEIGHT == INT4
// As wide as a register: what is wider does not stay in registers.
#if defined(__AVX512F__)
static const int WIDTH = 16;
#elif defined(__AVX2__)
static const int WIDTH = 8;
#else
static const int WIDTH = 4;
#endif
typedef float Part __attribute__((vector_size(4 * WIDTH)));
typedef int32_t PartIntegers __attribute__((vector_size(4 * WIDTH)));
typedef float LoosePart __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t LooseWords __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));

// Bytes of a panel for one column: of each group a scale, a zero, and a word of codes for 8 inputs.
static inline int64_t group_bytes(int64_t inputs) { return sizeof(float) + 1 + inputs / 2; }
static inline int64_t group_count(const Call& call) { return (call.in_features + call.group - 1) / call.group; }
static inline int64_t column_bytes(const Call& call) {
  return group_count(call) * group_bytes(0) + call.in_features / 2;
}

// Calls `with` with the codes of each input of a group for P parts of columns, in order.
template <int P, class F>
static inline void for_each_input(const int8_t* codes, int64_t count, F with) {
  for (int64_t k = 0; k < count; k += 8, codes += P * sizeof(Part)) {
    LooseWords words[P];
    for (int p = 0; p < P; p++) {
      if (p * sizeof(Part) % 64 == 0) __builtin_prefetch(codes + AHEAD + p * sizeof(Part), 0, 3);
      words[p] = ((const LooseWords*)codes)[p];
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      Part columns[P];
      for (int p = 0; p < P; p++)
        columns[p] = __builtin_convertvector((PartIntegers)(words[p] >> 4 * i & 15), Part);
      with(k + i, columns);
    }
  }
}
template <int P, class F>
static inline void for_each_input(const float* codes, int64_t count, F with) {
  for (int64_t k = 0; k < count; k++, codes += P * WIDTH) {
    Part columns[P];
    for (int p = 0; p < P; p++) columns[p] = *(const LoosePart*)(codes + p * WIDTH);
    with(k, columns);
  }
}

// Sums of R rows with V vectors of columns.
template <int R, int V, class W>
static inline void sum_up(const Terms<W>& terms, Floats (*sums)[VECTORS]) {
  constexpr int P = V * LANES / WIDTH;
  const int64_t groups = group_count(terms.call), group = terms.call.group;
  const Weight* panel = terms.panel;
  Part all_sums[R][P] = {};
  for (int64_t g = 0; g < groups; g++) {
    const int64_t count = std::min(group, terms.call.in_features - g * group);
    const Input* inputs = terms.inputs + g * group * R;
    const float* scales = (const float*)panel;
    const int8_t* zeros = panel + V * LANES * sizeof(float);
    Part own[R][P];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) {
        const Floats start = rounded(load(zeros + v * LANES) * -terms.group_sums[r * groups + g]);
        for (int p = 0; p < P / V; p++) own[r][v * (P / V) + p] = ((const LoosePart*)&start)[p];
      }
    const auto add = [&](int64_t k, const Part* columns) {
      for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) own[r][p] = columns[p] * inputs[k * R + r] + own[r][p];
    };
    if constexpr (sizeof(W) == 1)
      for_each_input<P>(zeros + V * LANES, count, add);
    else
      for_each_input<P>(terms.columns + g * group * V * LANES, count, add);
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) all_sums[r][p] += own[r][p] * *(const LoosePart*)(scales + p * WIDTH);
    panel += V * LANES * group_bytes(count);
  }
  // One by one: a whole array that is copied would be in memory all the time.
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) {
      const Part part = all_sums[r][p];
      memcpy((float*)sums[r] + p * WIDTH, &part, sizeof part);
    }
}
#else
static inline int64_t column_bytes(const Call& call) {
  return (call.in_features + PAIR - 1) / PAIR * PAIR * sizeof(Weight);
}

// Sums of R rows with V vectors of columns.
template <int R, int V, class W>
static inline void sum_up(const Terms<W>& terms, Floats (*sums)[VECTORS]) {
  const int64_t depth = (terms.call.in_features + PAIR - 1) / PAIR;
  const Input* inputs = terms.inputs;
  const W* weights = terms.columns;
  Vector own[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) own[r][v] = Vector{};
  for (int64_t k = 0; k < depth; k++, inputs += R, weights += V * LANES * PAIR) {
    for (unsigned i = 0; i < V * LANES * PAIR * sizeof(W); i += 64)
      __builtin_prefetch((const char*)weights + AHEAD + i, 0, 3);
    Column column[V];
    for (int v = 0; v < V; v++) column[v] = column_of(weights + v * LANES * PAIR);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) own[r][v] = add_product(inputs[r], column[v], own[r][v]);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store((float*)&sums[r][v], own[r][v]);
}
#endif

template <int R, int V, class W>
static void sum_rows(int rows, const Terms<W>& terms, Floats (*sums)[VECTORS]) {
  if (rows == R) return sum_up<R, V>(terms, sums);
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

// One vector of outputs, from its sums, at `column` of `row`.
static inline Floats finish(const Call& call, Floats value, const float* scale, const Element* bias, const Element* other) {
  if (scale) value *= load(scale);
  if (bias) value += load(bias);
  switch (call.operation) {
    case RELU: return value < Floats{} ? Floats{} : value;
    case SILU: return value * logistic(value);
    // x/2 (1 + tanh u) = x / (1 + e^-2u), with u = sqrt(2/pi) (x + 0.044715 x^3)
    case GELU_TANH: return value * logistic(value * (1.5957691216057308f + 0.07135481282553535f * value * value));
    case ADD: return value + load(other);
    case MULTIPLY: return value * load(other);
  }
  return value;
}

template <class T>
static inline const T* at(const T* from, int64_t offset) { return from ? from + offset : nullptr; }

static void write(const Call& call, int64_t row, int64_t column, Floats value) {
  const int count = (int)std::min<int64_t>(LANES, call.out_features - column);
  Element* to = call.outputs + row * call.out_features + column;
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
  const int64_t depth = (call.in_features + PAIR - 1) / PAIR;
  const int64_t groups = call.group ? (call.in_features + call.group - 1) / call.group : 0;
  for (int64_t block = first; block < last; block++) {
    const int64_t row = block * ROWS;
    const int rows = (int)std::min<int64_t>(ROWS, call.row_count - row);
    Floats sums[ROWS][VECTORS];
    const Terms<W> terms = {call, call.packed + row * depth, call.group_sums + row * groups, panel.weights, columns};
    sum_columns<VECTORS>(panel.vectors, rows, terms, sums);
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < panel.vectors; v++) write(call, row + r, panel.column + v * LANES, sums[r][v]);
  }
}

#if WEIGHT == INT8
static void unpack(const Call& call, const Panel& panel, Unpacked* to) {
  const int64_t width = LANES * PAIR, count = (call.in_features + PAIR - 1) / PAIR * panel.vectors;
  for (int64_t i = 0; i < count; i++) store_column(to + i * width, column_of(panel.weights + i * width));
}
#elif WEIGHT == INT4
template <int V>
static void unpack(const Call& call, const Panel& panel, Unpacked* to) {
  if constexpr (V > 1) {
    if (panel.vectors < V) return unpack<V - 1>(call, panel, to);
  }
  const Weight* from = panel.weights;
  for (int64_t first = 0; first < call.in_features; first += call.group) {
    const int64_t count = std::min(call.group, call.in_features - first);
    for_each_input<V * LANES / WIDTH>(from + V * LANES * group_bytes(0), count, [&](int64_t k, const Part* columns) {
      memcpy(to + (first + k) * V * LANES, columns, V * LANES * sizeof(float));
    });
    from += V * LANES * group_bytes(count);
  }
}
static void unpack(const Call& call, const Panel& panel, Unpacked* to) { unpack<VECTORS>(call, panel, to); }
#endif

static void multiply_panel(const Call& call, int64_t index, int64_t first, int64_t last, Unpacked* unpacked) {
  const Panel panel = panel_of(call, index);
#if WEIGHT != SAME
  if (last - first >= UNPACKED_BLOCKS) {
    unpack(call, panel, unpacked);
    return multiply_blocks<Unpacked>(call, panel, unpacked, first, last);
  }
#endif
  multiply_blocks(call, panel, panel.weights, first, last);
}

// The columns of a panel, and the inputs whose weights lie side by side.
extern "C" int32_t panel_columns() { return COLUMNS; }
extern "C" int32_t panel_pair() { return PAIR; }

// Returns 1, and outputs are not whole, if there is no memory for what a thread unpacks.
extern "C" int32_t multiply(const Call* given) {
  const Call& call = *given;
  const int64_t depth = (call.in_features + PAIR - 1) / PAIR;
  const int64_t blocks = (call.row_count + ROWS - 1) / ROWS, slice = call.group ? call.group : PACKED_INPUTS;
  const int64_t slices = (depth + slice - 1) / slice;
  const int64_t panels = (call.out_features + COLUMNS - 1) / COLUMNS;
  // Rows are divided, too, where panels alone would leave threads without work.
  const int64_t wanted = (4 * call.threads + panels - 1) / panels, most = (call.row_count + TASK_ROWS - 1) / TASK_ROWS;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, most));
  int32_t failed = 0;
#pragma omp parallel num_threads(call.threads) reduction(| : failed)
  {
#pragma omp for schedule(static)
    for (int64_t task = 0; task < blocks * slices; task++) {
      const int64_t first = task % slices * slice;
      pack(call, task / slices, first, std::min(depth, first + slice));
    }
    const bool unpacks = WEIGHT != SAME && blocks >= UNPACKED_BLOCKS;
    const std::unique_ptr<Unpacked[]> unpacked(
        unpacks ? new (std::nothrow) Unpacked[COLUMNS * depth * PAIR] : nullptr);
    failed = unpacks && !unpacked;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < panels * parts; task++) {
      if (failed) continue;
      const int64_t part = task % parts;
      multiply_panel(call, task / parts, blocks * part / parts, blocks * (part + 1) / parts, unpacked.get());
    }
  }
  return failed;
}
