// What a layer does to each row by itself, between its products: norms, rotation, and rows that go to pages.
//
// A result depends on its own row alone: terms are summed vector by vector in ascending order, then by `sum`'s tree.
// Whatever transformers rounds on its way is rounded here.

#pragma once

#include "vectors.h"

// Elements from which on threads share the work: fewer take less time than waking one.
static const int64_t SHARED = 1 << 16;

enum NormKind { NO_NORM, LAYER_NORM, RMS_NORM, WIDE_RMS_NORM };

// row_wise.py has the same structures.
struct Norm {
  const void* weight;  // Elements; fp32 of a WIDE_RMS_NORM, which rounds once
  const Element* bias;
  int32_t kind;
  float epsilon;
};

struct Heads {
  const Element* rows;           // [N, heads, width]
  const Element *cosine, *sine;  // [N, width], the first half of sines negated; null: none
  Element* outputs;              // may be the rows
  int64_t row_stride, head_stride, output_stride, output_head, row_count, head_count, width;
  Norm norm;
  int32_t threads;
};

// The value as ELEMENT has it.
static inline Floats as_element(Floats values) {
#if ELEMENT == FLOAT32
  return rounded(values);
#else
  Element elements[LANES];
  store(elements, values);
  return load(elements);
#endif
}

static void normalize(const Norm& norm, int64_t width, const Element* from, Element* to) {
  float mean = 0;
  if (norm.kind == LAYER_NORM) {
    Floats total = {};
    for (int64_t i = 0; i < width; i += LANES) total += load_some(from + i, width - i);
    mean = sum(total) / (float)width;
  }
  Floats squares = {};
  for (int64_t i = 0; i < width; i += LANES) {
    Floats values = load_some(from + i, width - i);
    if (norm.kind == LAYER_NORM) {
      values -= mean;
      // What is behind the row counts nothing.
      for (int64_t lane = width - i; lane < LANES; lane++) values[lane] = 0;
    }
    squares = multiply_add(values, values, squares);
  }
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / (float)width + norm.epsilon);
  const Element* weight = (const Element*)norm.weight;
  for (int64_t i = 0; i < width; i += LANES) {
    const int64_t count = width - i;
    Floats values = load_some(from + i, count);
    if (norm.kind == LAYER_NORM)
      values = multiply_add((values - mean) * factor, load_some(weight + i, count), load_some(norm.bias + i, count));
    else if (norm.kind == RMS_NORM)
      values = as_element(values * factor) * load_some(weight + i, count);
    else
      values = values * factor * load_some((const float*)norm.weight + i, count);
    store_some(to + i, values, count);
  }
}

// x * cosine + swap_halves(x) * sine; `from` may be `to`.
static void rotate(const Element* cosine, const Element* sine, int64_t width, const Element* from, Element* to) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t count = half - i;
    const Floats parts[2] = {load_some(from + i, count), load_some(from + half + i, count)};
    for (int h = 0; h < 2; h++) {
      const int64_t place = h * half + i;
      const Floats kept = as_element(parts[h] * load_some(cosine + place, count));
      const Floats swapped = as_element(parts[1 - h] * load_some(sine + place, count));
      store_some(to + place, kept + swapped, count);
    }
  }
}

// The norm of each head, and then its rotation, of several calls. It is called by all threads of a team.
static void turn_all(const Heads* calls, int count) {
  int64_t tasks = 0;
  for (int i = 0; i < count; i++) tasks += calls[i].row_count * calls[i].head_count;
#pragma omp for schedule(static)
  for (int64_t task = 0; task < tasks; task++) {
    int64_t own = task;
    const Heads* call = calls;
    for (; own >= call->row_count * call->head_count; call++) own -= call->row_count * call->head_count;
    const int64_t row = own / call->head_count, head = own % call->head_count, place = row * call->width;
    const Element* from = call->rows + row * call->row_stride + head * call->head_stride;
    Element* to = call->outputs + row * call->output_stride + head * call->output_head;
    if (call->norm.kind != NO_NORM) normalize(call->norm, call->width, from, to);
    if (call->cosine)
      rotate(call->cosine + place, call->sine + place, call->width, call->norm.kind == NO_NORM ? from : to, to);
  }
}

extern "C" void turn(const Heads* call) {
#pragma omp parallel num_threads(call->threads) if (call->row_count * call->head_count * call->width >= SHARED)
  turn_all(call, 1);
}

// Rows of K and V, `[N, heads, width]`, that go to rows of pages, `[pages, heads, C, width]`.
struct Written {
  const Element *keys, *values;
  Element *key_pages, *value_pages;
  const int64_t *pages, *rows;
  int64_t key_stride, key_head, value_stride, value_head, page_stride, page_head, row_count, head_count, width;
  int32_t threads;
};

static void write_all(const Written& call) {
#pragma omp for schedule(static)
  for (int64_t task = 0; task < call.row_count * call.head_count; task++) {
    const int64_t row = task / call.head_count, head = task % call.head_count;
    const int64_t to = call.pages[row] * call.page_stride + head * call.page_head + call.rows[row] * call.width;
    const size_t size = call.width * sizeof(Element);
    memcpy(call.key_pages + to, call.keys + row * call.key_stride + head * call.key_head, size);
    memcpy(call.value_pages + to, call.values + row * call.value_stride + head * call.value_head, size);
  }
}

extern "C" void write_rows(const Written* call) {
#pragma omp parallel num_threads(call->threads) if (call->row_count * call->head_count * call->width >= SHARED)
  write_all(*call);
}
