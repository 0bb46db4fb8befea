// Products of rows with a matrix that lies in panels: the kernel of panel_gemm.py.
//
// A panel holds VECTORS x 16 output columns (the last one fewer), for each input the weights of all
// its columns side by side. Each output is one chain of fused multiply-adds over the inputs in
// ascending order, in fp32: it depends on its own row and column only, not on the count of rows,
// on how rows are blocked, or on the threads. It is compiled for one ELEMENT (of rows and
// outputs) and one WEIGHT. int8 codes are multiplied as they are, without rounding, and each
// sum is scaled at its end.

#include "vectors.h"

#include <algorithm>
#include <memory>
#include <new>

#define SAME 0
#define INT8 1

// Weights of two inputs in one word, for an instruction that multiplies and adds both.
#if ELEMENT == BFLOAT16 && defined(__AVX512BF16__)
static const int PAIR = 2;
typedef int32_t Input;
typedef __m512bh Column;
#else
static const int PAIR = 1;
typedef float Input;
typedef Floats Column;
#endif

// Unpacked: what int8 is turned into for many rows.
#if WEIGHT == SAME
typedef Element Weight;
typedef Element Unpacked;
#else
typedef int8_t Weight;
#if ELEMENT == BFLOAT16 && defined(__AVX512BF16__)
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
// which int8 is unpacked once instead of for each of them.
static const int64_t PACKED_INPUTS = 256, TASK_ROWS = 64, UNPACKED_BLOCKS = 3;

enum Operation { NONE, RELU, SILU, GELU_TANH, ADD, MULTIPLY };

// What the kernel is called with; panel_gemm.py has the same structure.
struct Call {
  const Element* rows;
  const Weight* weights;
  const float* scales;  // of each column; null: 1
  const Element *bias, *other;
  Element* outputs;
  Input* packed;
  int64_t row_stride, other_stride, row_count, in_features, out_features;
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

// Packs inputs [first, last) of `count` rows: those of one input side by side.
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
  }
}

// Weights of a vector's columns, for one input or a pair.
#if ELEMENT == BFLOAT16 && defined(__AVX512BF16__)
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
static inline Column column_of(const W* from) { return load(from); }
static inline Floats add_product(Input input, Column column, Floats sum) {
  return multiply_add(all(input), column, sum);
}
static inline void store_column(float* to, Column column) { store(to, column); }
#endif

// Sums of R rows with V vectors of columns.
template <int R, int V, class W>
static inline void sum_up(const Input* inputs, const W* weights, int64_t depth, Floats (*sums)[VECTORS]) {
  Floats own[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) own[r][v] = Floats{};
  for (int64_t k = 0; k < depth; k++, inputs += R, weights += V * LANES * PAIR) {
    for (unsigned i = 0; i < V * LANES * PAIR * sizeof(W); i += 64)
      __builtin_prefetch((const char*)weights + AHEAD + i, 0, 3);
    Column column[V];
    for (int v = 0; v < V; v++) column[v] = column_of(weights + v * LANES * PAIR);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) own[r][v] = add_product(inputs[r], column[v], own[r][v]);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = own[r][v];
}

template <int R, int V, class W>
static void sum_rows(int rows, const Input* inputs, const W* weights, int64_t depth, Floats (*sums)[VECTORS]) {
  if (rows == R) return sum_up<R, V>(inputs, weights, depth, sums);
  if constexpr (R > 1) sum_rows<R - 1, V>(rows, inputs, weights, depth, sums);
}

template <int V, class W>
static void sum_columns(
    int vectors, int rows, const Input* inputs, const W* weights, int64_t depth, Floats (*sums)[VECTORS]) {
  if (vectors == V) return sum_rows<ROWS, V>(rows, inputs, weights, depth, sums);
  if constexpr (V > 1) sum_columns<V - 1>(vectors, rows, inputs, weights, depth, sums);
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
  int64_t depth, column;
  int vectors;
  const Weight* weights;
};

static Panel panel_of(const Call& call, int64_t index) {
  const int64_t depth = (call.in_features + PAIR - 1) / PAIR, column = index * COLUMNS;
  const int vectors = (int)std::min<int64_t>(VECTORS, (call.out_features - column + LANES - 1) / LANES);
  return {depth, column, vectors, call.weights + column * depth * PAIR};
}

template <class W>
static void multiply_blocks(const Call& call, const Panel& panel, const W* weights, int64_t first, int64_t last) {
  for (int64_t block = first; block < last; block++) {
    const int rows = (int)std::min<int64_t>(ROWS, call.row_count - block * ROWS);
    Floats sums[ROWS][VECTORS];
    const Input* inputs = call.packed + block * ROWS * panel.depth;
    sum_columns<VECTORS>(panel.vectors, rows, inputs, weights, panel.depth, sums);
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < panel.vectors; v++)
        write(call, block * ROWS + r, panel.column + v * LANES, sums[r][v]);
  }
}

static void multiply_panel(const Call& call, int64_t index, int64_t first, int64_t last, Unpacked* unpacked) {
  const Panel panel = panel_of(call, index);
#if WEIGHT == INT8
  if (last - first >= UNPACKED_BLOCKS) {
    const int64_t width = LANES * PAIR, count = panel.depth * panel.vectors;
    for (int64_t i = 0; i < count; i++) store_column(unpacked + i * width, column_of(panel.weights + i * width));
    return multiply_blocks(call, panel, unpacked, first, last);
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
  const int64_t blocks = (call.row_count + ROWS - 1) / ROWS, slices = (depth + PACKED_INPUTS - 1) / PACKED_INPUTS;
  const int64_t panels = (call.out_features + COLUMNS - 1) / COLUMNS;
  // Rows are divided, too, where panels alone would leave threads without work.
  const int64_t wanted = (4 * call.threads + panels - 1) / panels, most = (call.row_count + TASK_ROWS - 1) / TASK_ROWS;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, most));
  int32_t failed = 0;
#pragma omp parallel num_threads(call.threads) reduction(| : failed)
  {
#pragma omp for schedule(static)
    for (int64_t task = 0; task < blocks * slices; task++) {
      const int64_t first = task % slices * PACKED_INPUTS;
      pack(call, task / slices, first, std::min(depth, first + PACKED_INPUTS));
    }
    const bool unpacks = WEIGHT == INT8 && blocks >= UNPACKED_BLOCKS;
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
