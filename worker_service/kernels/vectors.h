// Vectors of 16 floats, whatever the processor's width, and the functions that kernels share.
// ELEMENT names the type of rows and pages: FLOAT32, BFLOAT16 or FLOAT16.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__) || defined(__FMA__)
#include <immintrin.h>
#endif

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef float LooseFloats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(32), aligned(2), may_alias));
typedef int8_t LooseBytes __attribute__((vector_size(16), aligned(1), may_alias));

#if ELEMENT == FLOAT32
typedef float Element;
#else
typedef uint16_t Element;
#endif

static const int LANES = 16;

static inline Floats load(const float* from) { return *(const LooseFloats*)from; }
static inline void store(float* to, Floats values) { *(LooseFloats*)to = values; }
static inline Floats all(float value) { return Floats{} + value; }

// Not the compiler's conversion of vectors, which takes 4 times as long.
static inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  Floats values;
  for (int i = 0; i < LANES; i += 8) {
    const __m256 half = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + i))));
    memcpy((float*)&values + i, &half, sizeof half);
  }
  return values;
#else
  return __builtin_convertvector(__builtin_convertvector((Bytes)*(const LooseBytes*)from, Integers), Floats);
#endif
}

// a * b + c, rounded once where the processor can. Vectors: c may be a product only if it is `rounded`.
static inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
static inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// The same numbers; the compiler makes no product before them part of a sum behind them.
static inline Floats rounded(Floats values) {
#if defined(__AVX512F__)
  asm("" : "+v"(values));
#else
  asm("" : "+m"(values));
#endif
  return values;
}

#if ELEMENT == BFLOAT16
static inline Floats load(const uint16_t* from) {
  return (Floats)(__builtin_convertvector(*(const LooseHalves*)from, Words) << 16);
}
// Rounds to the nearest, ties to even; NaN stays NaN.
static inline void store(uint16_t* to, Floats values) {
  const Words bits = (Words)values;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Integers is_nan = values != values;
  *(LooseHalves*)to = __builtin_convertvector(is_nan ? (Words{} + 0x7fc0) : rounded, Halves);
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
static inline void store(uint16_t* to, Floats values) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (int i = 0; i < LANES; i += 8) {
    __m256 part;
    memcpy(&part, (const float*)&values + i, sizeof part);
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  for (int i = 0; i < LANES; i++) {
    const _Float16 half = (_Float16)values[i];
    memcpy(to + i, &half, sizeof half);
  }
#endif
}
#endif

// What registers hold of 16 floats: compilers keep vectors of 64 bytes in memory where registers have 32.
#if !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NARROW 1
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
static inline Vector vector_of(Floats values) { return vector_of((const float*)&values); }
static inline Vector add_to(Vector sum, float input, Vector column) {
  const __m256 factor = _mm256_set1_ps(input);
  return {_mm256_fmadd_ps(factor, column.low, sum.low), _mm256_fmadd_ps(factor, column.high, sum.high)};
}
static inline Vector add_to(Vector sum, Vector a, Vector b) {
  return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
static inline Vector plus(Vector a, Vector b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
static inline Vector times(Vector a, float factor) {
  const __m256 all = _mm256_set1_ps(factor);
  return {_mm256_mul_ps(a.low, all), _mm256_mul_ps(a.high, all)};
}
// `a` where it is larger; NaN is not.
static inline Vector larger(Vector a, Vector b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
static inline void store(float* to, Vector values) {
  // Or GCC keeps the first of them in memory while int8 is read, which could be anything's bytes.
  asm("" : "+x"(values.low), "+x"(values.high));
  _mm256_storeu_ps(to, values.low);
  _mm256_storeu_ps(to + 8, values.high);
}
#else
#define NARROW 0
typedef Floats Vector;
template <class W>
static inline Vector vector_of(const W* from) { return load(from); }
static inline Vector vector_of(Floats values) { return values; }
static inline Vector add_to(Vector sum, float input, Vector column) { return multiply_add(all(input), column, sum); }
static inline Vector add_to(Vector sum, Vector a, Vector b) { return multiply_add(a, b, sum); }
static inline Vector plus(Vector a, Vector b) { return a + b; }
static inline Vector times(Vector a, float factor) { return rounded(a * factor); }
static inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }
#endif
static inline Floats floats_of(Vector values) {
  Floats floats;
  memcpy(&floats, &values, sizeof floats);
  return floats;
}

// e^x for x <= 0, as Cephes' expf: within 2 units in the last place. 0 below -87; NaN stays NaN.
template <class F, class I>
static inline F exponential_of(F x) {
  const I under = x < -87.0f;
  x = under ? F{} - 87.0f : x;
  const F whole = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const F r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  F y = F{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  y = y * (F)((__builtin_convertvector(whole, I) + 127) << 23);
  return under ? F{} : y;
}
#if NARROW
static inline Vector exponential(Vector x) {
  typedef float Half __attribute__((vector_size(32)));
  typedef int32_t HalfIntegers __attribute__((vector_size(32)));
  return {(__m256)exponential_of<Half, HalfIntegers>((Half)x.low),
          (__m256)exponential_of<Half, HalfIntegers>((Half)x.high)};
}
static inline Floats exponential(Floats x) { return floats_of(exponential(vector_of(x))); }
#else
static inline Floats exponential(Floats x) { return exponential_of<Floats, Integers>(x); }
#endif

// The first `count` elements, or a whole vector of them; 0 behind them.
template <class T>
static inline Floats load_some(const T* from, int64_t count) {
  if (count >= LANES) return load(from);
  T some[LANES] = {};
  memcpy(some, from, count * sizeof(T));
  return load(some);
}
static inline void store_some(Element* to, Floats values, int64_t count) {
  if (count >= LANES) return store(to, values);
  Element some[LANES];
  store(some, values);
  memcpy(to, some, count * sizeof(Element));
}

// The sum of all lanes, in a fixed order.
static inline float sum(Floats v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v[0];
}

// Memory of a thread that stays for its next call.
struct Room {
  char* memory = nullptr;
  size_t size = 0;
  ~Room() { give_back(); }
  void give_back() {
    free(memory);
    memory = nullptr;
    size = 0;
  }
  // Null if there is none.
  void* of(size_t wanted) {
    if (wanted > size) {
      give_back();
      memory = (char*)aligned_alloc(64, (wanted + 63) / 64 * 64);
      size = memory ? wanted : 0;
    }
    return memory;
  }
};
