// A whole layer before and behind its attention, in one team of threads each: between two products they wait for each
// other, and do not sleep. The same functions as of single calls compute it, so rows have the same bits.

#pragma once

// whole_layer.py has the same structures.
struct Matrix {
  const Weight* panels;  // null: there is none
  const float* scales;
  const Element* bias;
  int64_t in_features, out_features, group;
};

struct Layer {
  Matrix query, key, value, output, gate, up, down;  // without `value` a key has both
  Norm attention_norm, mlp_norm, query_norm, key_norm;
  int64_t head_dim;
  int32_t activation;  // an Operation
};

struct Pass {
  const Layer* layer;
  const Element *hidden, *attended, *cosine, *sine;
  Element *inputs, *queries, *both, *outputs;  // X, q [N, n_q, d], k and v [N, 2, n_kv, d], the next hidden
  int64_t row_count;
  int32_t threads;
};

// What a pass needs beside its results.
struct Space {
  Element *middle, *normed, *inner;
  Input* packed;
  float* sums;

  static int64_t in_vectors(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  static size_t bytes(const Pass& pass) {
    const Layer& layer = *pass.layer;
    const int64_t depth = std::max({layer.query.in_features, layer.output.in_features, layer.down.in_features});
    const int64_t elements = 2 * layer.query.in_features + layer.up.out_features;
    return pass.row_count * in_vectors(elements * sizeof(Element) + depth * 4 + (WEIGHT == INT4 ? depth / 2 : 0)) + 256;
  }
  Space(const Pass& pass, char* memory) {
    const Layer& layer = *pass.layer;
    const int64_t depth = std::max({layer.query.in_features, layer.output.in_features, layer.down.in_features});
    packed = (Input*)memory;
    sums = (float*)(packed + pass.row_count * depth);
    middle = (Element*)(sums + (WEIGHT == INT4 ? pass.row_count * (depth / 8) : 0));
    normed = middle + pass.row_count * layer.query.in_features;
    inner = normed + pass.row_count * layer.query.in_features;
  }
};

static Call product(const Pass& pass, const Space& space, const Matrix& matrix, const Element* rows, Element* outputs,
                    int32_t operation, const Element* other = nullptr) {
  Call call = {};
  call.rows = rows;
  call.weights = matrix.panels;
  call.scales = matrix.scales;
  call.bias = matrix.bias;
  call.other = other;
  call.outputs = outputs;
  call.packed = space.packed;
  call.group_sums = WEIGHT == INT4 ? space.sums : nullptr;
  call.row_stride = call.in_features = matrix.in_features;
  call.other_stride = call.output_stride = call.out_features = matrix.out_features;
  call.row_count = pass.row_count;
  call.group = matrix.group;
  call.operation = operation;
  call.threads = pass.threads;
  return call;
}

static Heads normed(const Pass& pass, const Norm& norm, const Element* rows, Element* outputs) {
  const int64_t width = pass.layer->query.in_features;
  return {rows, nullptr, nullptr, outputs, width, 0, width, 0, pass.row_count, 1, width, norm, pass.threads};
}

// Heads that are turned where they are.
static Heads turned(const Pass& pass, const Norm& norm, Element* heads, int64_t out_features, int64_t stride) {
  const int64_t width = pass.layer->head_dim;
  return {heads,  pass.cosine, pass.sine,      heads,                stride, width,       stride,
          width, pass.row_count, out_features / width, width, norm, pass.threads};
}

// What follows is called by all threads of a team; they do not wait for each other at its end.

static void prepare_begin(const Pass& pass, const Space& space) {
  const Heads norm = normed(pass, pass.layer->attention_norm, pass.hidden, pass.inputs);
  turn_all(&norm, 1);
  const Call query = product(pass, space, pass.layer->query, pass.inputs, pass.queries, NONE);
  pack_all(&query, 1);
}

static int32_t begin(const Pass& pass, const Space& space) {
  const Layer& layer = *pass.layer;
  const Call query = product(pass, space, layer.query, pass.inputs, pass.queries, NONE);
  Call key = product(pass, space, layer.key, pass.inputs, pass.both, NONE);
  Call value = product(pass, space, layer.value, pass.inputs, pass.both + key.out_features, NONE);
  const bool is_apart = value.weights != nullptr;
  const int64_t width = key.out_features / (is_apart ? 1 : 2);
  key.output_stride = value.output_stride = 2 * width;
  int32_t failed = multiply_all(&query, nullptr, 1) | multiply_all(&key, nullptr, 1);
  if (is_apart) failed |= multiply_all(&value, nullptr, 1);
  const Heads heads[] = {
      turned(pass, layer.query_norm, pass.queries, query.out_features, query.out_features),
      turned(pass, layer.key_norm, pass.both, width, 2 * width),
  };
  if (!pass.cosine && layer.query_norm.kind == NO_NORM && layer.key_norm.kind == NO_NORM) return failed;
#pragma omp barrier
  turn_all(heads, 2);
  return failed;
}

static void prepare_end(const Pass& pass, const Space& space) {
  const Call output = product(pass, space, pass.layer->output, pass.attended, space.middle, ADD, pass.hidden);
  pack_all(&output, 1);
}

static int32_t end(const Pass& pass, const Space& space) {
  const Layer& layer = *pass.layer;
  const Call output = product(pass, space, layer.output, pass.attended, space.middle, ADD, pass.hidden);
  int32_t failed = multiply_all(&output, nullptr, 1);
#pragma omp barrier
  const Heads norm = normed(pass, layer.mlp_norm, space.middle, space.normed);
  turn_all(&norm, 1);
  const bool is_gated = layer.gate.panels != nullptr;
  const Call gate = product(pass, space, layer.gate, space.normed, space.inner, layer.activation);
  const Call up = product(pass, space, layer.up, space.normed, space.inner, is_gated ? MULTIPLY : layer.activation,
                          is_gated ? space.inner : nullptr);
  pack_all(&up, 1);
  failed |= is_gated ? multiply_all(&gate, &up, 1) : multiply_all(&up, nullptr, 1);
#pragma omp barrier
  const Call down = product(pass, space, layer.down, space.inner, pass.outputs, ADD, space.middle);
  pack_all(&down, 1);
  return failed | multiply_all(&down, nullptr, 1);
}

template <class Prepare, class Rest>
static int32_t in_team(const Pass& pass, int64_t in_features, Prepare prepare, Rest rest) {
  char* memory = (char*)own_room.of(Space::bytes(pass));
  if (!memory) return 1;
  const Space space(pass, memory);
  const bool is_small = pass.row_count * in_features <= PACKED_ALONE;
  if (is_small) prepare(pass, space);
  int32_t failed = 0;
#pragma omp parallel num_threads(pass.threads) reduction(| : failed)
  {
    if (!is_small) prepare(pass, space);
    failed = rest(pass, space);
  }
  if (own_room.size > KEPT_BYTES) own_room.give_back();
  return failed;
}

// X, queries, keys and values of hidden rows. Returns 1 as `multiply`.
extern "C" int32_t begin_layer(const Pass* pass) {
  return in_team(*pass, pass->layer->query.in_features, prepare_begin, begin);
}

// The next hidden of hidden rows and what they attended. Returns 1 as `multiply`.
extern "C" int32_t end_layer(const Pass* pass) {
  return in_team(*pass, pass->layer->output.in_features, prepare_end, end);
}
