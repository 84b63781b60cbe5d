/* Rotation of channel pairs on the CPU: tensors in, tensors out, as addresses with shapes and strides.
 *
 * Plain C and the limited Python API, no PyTorch headers, so that it builds in a second and fits every torch. It is
 * only called from inside the dispatcher's CPU kernels (native.py), where tensors are plain and dense in memory.
 *
 * Every product and sum is rounded by itself (-ffp-contract=off), in float for float, bfloat16 and half, in double for
 * double; 16-bit results are rounded once. That makes it bit-equal to the same arithmetic in PyTorch.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

/* One body, compiled for two processors; the faster that runs is chosen when the library is loaded. Neither has a fused
 * multiply-add, and a build for a processor that has one must not see pairs as complex numbers: GCC 12 then makes
 * vfmaddsub of two products and a difference, whatever -ffp-contract says. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-slp-vectorize")
#endif
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define VERSIONS __attribute__((target_clones("default", "avx2")))
#else
#define VERSIONS
#endif

/* Hardware that turns eight halves at a time into floats and back: a quarter of the time that their bits take. */
#if defined(__GNUC__) && defined(__x86_64__) && !defined(WITHOUT_HALF_HARDWARE)
#define HALF_HARDWARE __attribute__((target("avx,f16c")))
#include <immintrin.h>
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

#define MAX_AXES 8
#define TILE_BYTES 131072  /* of the table: a quarter of a second-level cache; smaller tiles break the streams of x and out */
#define SERIAL_BYTES 65536 /* less work than this is done by the calling thread */

/* Numbers at any address: torch.frombuffer with an odd offset makes tensors that are not aligned. */
#if defined(__GNUC__)
#define ANYWHERE __attribute__((aligned(1), may_alias))
#else
#define ANYWHERE
#endif
typedef float any_float ANYWHERE;
typedef double any_double ANYWHERE;
typedef uint16_t any_16 ANYWHERE;
typedef uint32_t any_32 ANYWHERE;

/* ------------------------------------------------------------------ 16-bit numbers */

INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float from_bfloat(uint16_t x) { return bits_to_float((uint32_t)x << 16); }

INLINE uint16_t to_bfloat(float value) { /* to nearest, ties to even; NaN as PyTorch writes it */
    uint32_t bits = float_to_bits(value);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? 0x7FC0u : rounded);
}

INLINE float from_half(uint16_t x) { /* no denormal float on the way, which a processor may be set to flush */
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, size = x & 0x7FFFu;
    float small = (float)(int32_t)size * 5.9604644775390625e-8f; /* 2^-24 */
    uint32_t normal = (size << 13) + 0x38000000u;                /* the exponent's bias from 15 to 127 */
    uint32_t result = size < 0x400u ? float_to_bits(small) : normal;
    return bits_to_float(sign | (size >= 0x7C00u ? (size << 13) | 0x7F800000u : result));
}

INLINE uint16_t to_half(float value) { /* to nearest, ties to even */
    uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu;
    uint32_t rebased = size - 0x38000000u; /* the exponent's bias from 127 to 15 */
    uint32_t normal = (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
    uint32_t subnormal = float_to_bits(bits_to_float(size) + 0.5f) - 0x3F000000u; /* the addition rounds */
    uint32_t result = size < 0x38800000u ? subnormal : normal;
    result = size >= 0x477FF000u ? 0x7C00u : result;            /* infinite, or rounds to it */
    result = size > 0x7F800000u ? 0x7E00u | ((size >> 13) & 0x3FFu) : result;
    return (uint16_t)(sign | result);
}

static void widen_bits(const any_16 *x, float *wide, int64_t count) {
    for (int64_t i = 0; i < count; i++) wide[i] = from_half(x[i]);
}

static void narrow_bits(const float *wide, any_16 *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = to_half(wide[i]);
}

#ifdef HALF_HARDWARE
HALF_HARDWARE static void widen_hardware(const any_16 *x, float *wide, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    for (; i < count; i++) wide[i] = _cvtsh_ss(x[i]);
}

HALF_HARDWARE static void narrow_hardware(const float *wide, any_16 *x, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(x + i), _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < count; i++) x[i] = _cvtss_sh(wide[i], _MM_FROUND_TO_NEAREST_INT);
}
#endif

static void (*widen)(const any_16 *x, float *wide, int64_t count) = widen_bits;
static void (*narrow)(const float *wide, any_16 *x, int64_t count) = narrow_bits;

INLINE float same_float(float x) { return x; }
INLINE double same_double(double x) { return x; }

/* ------------------------------------------------------------------ rows: the pairs of one token, of one head or two */

typedef void (*Row)(const void *x, void *out, const void *cos, const void *sin, int64_t pairs, double sign);
typedef void (*TwoRows)(const void *x, void *out, const void *y, void *y_out, const void *cos, const void *sin, int64_t pairs,
                        double sign);
typedef struct {
    Row one;
    TwoRows two; /* heads with one table, which is read once for both; NULL where only one goes at a time */
} Turn;

/* Reading both halves of a pair before writing either makes it right in place, too. */
#define TURN(X, OUT, FIRST, SECOND, WIDE, LOAD, STORE) \
    {                                                  \
        WIDE a = LOAD(X[FIRST]), b = LOAD(X[SECOND]);  \
        OUT[FIRST] = STORE(a * c - b * s);             \
        OUT[SECOND] = STORE(b * c + a * s);            \
    }
#define HALVES(X, OUT, WIDE, LOAD, STORE) TURN(X, OUT, i, i + pairs, WIDE, LOAD, STORE)
#define NEIGHBOURS(X, OUT, WIDE, LOAD, STORE) TURN(X, OUT, 2 * i, 2 * i + 1, WIDE, LOAD, STORE)

#define ROW(NAME, STORED, TABLE, PAIRING, WIDE, LOAD, STORE)                                                                 \
    VERSIONS static void NAME(const void *x_, void *out_, const void *cos_, const void *sin_, int64_t pairs, double sign_) { \
        const STORED *x = (const STORED *)x_;                                                                                \
        STORED *out = (STORED *)out_;                                                                                        \
        const TABLE *cos = (const TABLE *)cos_, *sin = (const TABLE *)sin_;                                                  \
        const WIDE sign = (WIDE)sign_;                                                                                       \
        INDEPENDENT for (int64_t i = 0; i < pairs; i++) {                                                                    \
            WIDE c = cos[i], s = sin[i] * sign;                                                                              \
            PAIRING(x, out, WIDE, LOAD, STORE)                                                                               \
        }                                                                                                                    \
    }                                                                                                                        \
    VERSIONS static void NAME##_twice(const void *x_, void *out_, const void *y_, void *y_out_, const void *cos_,            \
                                      const void *sin_, int64_t pairs, double sign_) {                                       \
        const STORED *x = (const STORED *)x_, *y = (const STORED *)y_;                                                       \
        STORED *out = (STORED *)out_, *y_out = (STORED *)y_out_;                                                             \
        const TABLE *cos = (const TABLE *)cos_, *sin = (const TABLE *)sin_;                                                  \
        const WIDE sign = (WIDE)sign_;                                                                                       \
        INDEPENDENT for (int64_t i = 0; i < pairs; i++) {                                                                    \
            WIDE c = cos[i], s = sin[i] * sign;                                                                              \
            PAIRING(x, out, WIDE, LOAD, STORE)                                                                               \
            PAIRING(y, y_out, WIDE, LOAD, STORE)                                                                             \
        }                                                                                                                    \
    }

ROW(half_float, any_float, any_float, HALVES, float, same_float, same_float)
ROW(half_double, any_double, any_double, HALVES, double, same_double, same_double)
ROW(half_bfloat, any_16, any_float, HALVES, float, from_bfloat, to_bfloat)
ROW(pair_float, any_float, any_float, NEIGHBOURS, float, same_float, same_float)
ROW(pair_double, any_double, any_double, NEIGHBOURS, double, same_double, same_double)

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
ROW(pair_bfloat, any_16, any_float, NEIGHBOURS, float, from_bfloat, to_bfloat)
#else /* a pair is one word of 32 bits, which spares the vectors all shuffling: half the time */
#define WORD(X, OUT, WIDE, LOAD, STORE)                                       \
    {                                                                         \
        WIDE a = LOAD(X[i] << 16), b = LOAD(X[i] & 0xFFFF0000u);              \
        OUT[i] = STORE(a * c - b * s) | (uint32_t)STORE(b * c + a * s) << 16; \
    }
ROW(pair_bfloat, any_32, any_float, WORD, float, bits_to_float, to_bfloat)
#endif

#define CHUNK 64 /* pairs of halves that are turned as floats, in a buffer of half a kilobyte */

static void half_half(const void *x_, void *out_, const void *cos_, const void *sin_, int64_t pairs, double sign) {
    const any_16 *x = (const any_16 *)x_;
    any_16 *out = (any_16 *)out_;
    const any_float *cos = (const any_float *)cos_, *sin = (const any_float *)sin_;
    float wide[2 * CHUNK];
    for (int64_t i = 0; i < pairs; i += CHUNK) {
        int64_t some = pairs - i < CHUNK ? pairs - i : CHUNK;
        widen(x + i, wide, some), widen(x + pairs + i, wide + some, some);
        half_float(wide, wide, cos + i, sin + i, some, sign);
        narrow(wide, out + i, some), narrow(wide + some, out + pairs + i, some);
    }
}

static void pair_half(const void *x_, void *out_, const void *cos_, const void *sin_, int64_t pairs, double sign) {
    const any_16 *x = (const any_16 *)x_;
    any_16 *out = (any_16 *)out_;
    const any_float *cos = (const any_float *)cos_, *sin = (const any_float *)sin_;
    float wide[2 * CHUNK];
    for (int64_t i = 0; i < pairs; i += CHUNK) {
        int64_t some = pairs - i < CHUNK ? pairs - i : CHUNK;
        widen(x + 2 * i, wide, 2 * some);
        pair_float(wide, wide, cos + i, sin + i, some, sign);
        narrow(wide, out + 2 * i, 2 * some);
    }
}

#ifdef HALF_HARDWARE
/* Widening by unpacking and narrowing by packing both work inside the two lanes of a vector, so that their orders cancel
 * out when the table is loaded in the same order: four elements from each half of a run of sixteen. */
#define LANES __attribute__((target("avx2"), always_inline)) static inline

LANES __m256 unpacked(__m256i x, int upper) {
    __m256i zero = _mm256_setzero_si256();
    return _mm256_castsi256_ps(upper ? _mm256_unpackhi_epi16(zero, x) : _mm256_unpacklo_epi16(zero, x));
}

LANES __m256 lanes_of(const any_float *row, int upper) {
    const float *at = (const float *)row + 4 * upper;
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(at)), _mm_loadu_ps(at + 8), 1);
}

LANES __m256i rounded(__m256 value) { /* as to_bfloat */
    __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7FC0), nan);
}

#define AVX2 __attribute__((target("avx2")))

LANES void turn_in_lanes(const any_16 *x, any_16 *out, int64_t pairs, const __m256 *c, const __m256 *s) {
    __m256i first = _mm256_loadu_si256((const __m256i *)x), second = _mm256_loadu_si256((const __m256i *)(x + pairs));
    __m256i turned[2][2];
    for (int upper = 0; upper < 2; upper++) {
        __m256 a = unpacked(first, upper), b = unpacked(second, upper);
        turned[0][upper] = rounded(_mm256_sub_ps(_mm256_mul_ps(a, c[upper]), _mm256_mul_ps(b, s[upper])));
        turned[1][upper] = rounded(_mm256_add_ps(_mm256_mul_ps(b, c[upper]), _mm256_mul_ps(a, s[upper])));
    }
    _mm256_storeu_si256((__m256i *)out, _mm256_packus_epi32(turned[0][0], turned[0][1]));
    _mm256_storeu_si256((__m256i *)(out + pairs), _mm256_packus_epi32(turned[1][0], turned[1][1]));
}

/* One row, or two with one table: without a second, y is NULL, which costs one test for sixteen pairs. */
LANES void half_bfloat_lanes(const any_16 *x, any_16 *out, const any_16 *y, any_16 *y_out, const any_float *cos,
                             const any_float *sin, int64_t pairs, float sign) {
    const __m256 signs = _mm256_set1_ps(sign);
    int64_t i = 0;
    for (; i + 16 <= pairs; i += 16) {
        __m256 c[2], s[2];
        for (int upper = 0; upper < 2; upper++) {
            c[upper] = lanes_of(cos + i, upper);
            s[upper] = _mm256_mul_ps(lanes_of(sin + i, upper), signs);
        }
        turn_in_lanes(x + i, out + i, pairs, c, s);
        if (y) turn_in_lanes(y + i, y_out + i, pairs, c, s);
    }
    for (; i < pairs; i++) {
        float c = cos[i], s = sin[i] * sign;
        HALVES(x, out, float, from_bfloat, to_bfloat)
        if (y) HALVES(y, y_out, float, from_bfloat, to_bfloat)
    }
}

AVX2 static void half_bfloat_in_lanes(const void *x, void *out, const void *cos, const void *sin, int64_t pairs, double sign) {
    half_bfloat_lanes((const any_16 *)x, (any_16 *)out, NULL, NULL, (const any_float *)cos, (const any_float *)sin, pairs, (float)sign);
}

AVX2 static void half_bfloat_in_lanes_twice(const void *x, void *out, const void *y, void *y_out, const void *cos,
                                            const void *sin, int64_t pairs, double sign) {
    half_bfloat_lanes((const any_16 *)x, (any_16 *)out, (const any_16 *)y, (any_16 *)y_out, (const any_float *)cos,
                      (const any_float *)sin, pairs, (float)sign);
}
#endif

static Turn TURNS[2][4] = {
    {{half_float, half_float_twice}, {half_double, half_double_twice}, {half_bfloat, half_bfloat_twice}, {half_half, NULL}},
    {{pair_float, pair_float_twice}, {pair_double, pair_double_twice}, {pair_bfloat, pair_bfloat_twice}, {pair_half, NULL}}};
static const int64_t STORED_BYTES[4] = {4, 8, 2, 2}, WIDE_BYTES[4] = {4, 8, 4, 4};

/* ------------------------------------------------------------------ all rows of a tensor */

typedef struct {
    const char *x, *cos, *sin;
    char *out;
    int axes;                                                           /* all but the channels, slowest first */
    int64_t size[MAX_AXES], x_step[MAX_AXES], out_step[MAX_AXES], table_step[MAX_AXES]; /* in bytes */
    int64_t rows, channels, first, pairs;
    int64_t stored;                                                     /* bytes per channel */
    double sign;
    Turn turn;
    int twins; /* whether each row has a second one with its table, some bytes further */
    int64_t x_twin, out_twin;
} Job;

typedef struct {
    const Job *jobs;
    int count;
} Work;

/* Channels that do not turn. */
INLINE void copy_rest(const Job *job, const char *x, char *out) {
    const int64_t before = job->first * job->stored, turning = 2 * job->pairs * job->stored;
    const int64_t after = job->channels * job->stored - before - turning;
    if (out != x && before) memcpy(out, x, (size_t)before);
    if (out != x && after) memcpy(out + before + turning, x + before + turning, (size_t)after);
}

static void rotate_rows(const Job *job, int64_t begin, int64_t end) {
    int64_t index[MAX_AXES], at = begin;
    const char *x = job->x, *cos = job->cos, *sin = job->sin;
    char *out = job->out;
    for (int axis = job->axes - 1; axis >= 0; axis--) {
        index[axis] = at % job->size[axis];
        at /= job->size[axis];
        x += index[axis] * job->x_step[axis];
        out += index[axis] * job->out_step[axis];
        cos += index[axis] * job->table_step[axis];
        sin += index[axis] * job->table_step[axis];
    }
    const int64_t before = job->first * job->stored;
    for (int64_t row = begin; row < end; row++) {
        copy_rest(job, x, out);
        if (job->twins) {
            const char *y = x + job->x_twin;
            char *y_out = out + job->out_twin;
            copy_rest(job, y, y_out);
            job->turn.two(x + before, out + before, y + before, y_out + before, cos, sin, job->pairs, job->sign);
        } else {
            job->turn.one(x + before, out + before, cos, sin, job->pairs, job->sign);
        }
        for (int axis = job->axes - 1; axis >= 0; axis--) {
            x += job->x_step[axis], out += job->out_step[axis];
            cos += job->table_step[axis], sin += job->table_step[axis];
            if (++index[axis] < job->size[axis]) break;
            x -= index[axis] * job->x_step[axis], out -= index[axis] * job->out_step[axis];
            cos -= index[axis] * job->table_step[axis], sin -= index[axis] * job->table_step[axis];
            index[axis] = 0;
        }
    }
}

static void rotate_range(int64_t begin, int64_t end, void *context) {
    const Work *work = (const Work *)context;
    for (int i = 0; i < work->count && begin < end; i++) {
        const int64_t rows = work->jobs[i].rows;
        if (begin < rows) rotate_rows(&work->jobs[i], begin, end < rows ? end : rows);
        begin = begin > rows ? begin - rows : 0;
        end -= rows;
    }
}

/* ------------------------------------------------------------------ threads: torch's own */

typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, void (*)(int64_t, int64_t, void *), void *);
static ParallelFor parallel_for = NULL;

static PyObject *use_threads(PyObject *self, PyObject *address) {
    (void)self;
    void *found = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    memcpy(&parallel_for, &found, sizeof parallel_for);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------ from Python */

static int numbers(PyObject *tuple, int64_t *out, int most) {
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    if (count < 0 || count > most) {
        PyErr_SetString(count < 0 ? PyExc_TypeError : PyExc_ValueError, "rotate: a tuple of at most 9 integers was expected");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (out[i] == -1 && PyErr_Occurred()) return -1;
    }
    return (int)count;
}

/* Slowest axis first, by the output's steps, so that memory is written in order; axes of one are left away. */
static void in_memory_order(Job *job) {
    int kept = 0;
    for (int axis = 0; axis < job->axes; axis++) {
        if (job->size[axis] == 1) continue;
        int to = kept++;
        int64_t size = job->size[axis], x = job->x_step[axis], out = job->out_step[axis], table = job->table_step[axis];
        for (; to > 0 && job->out_step[to - 1] < out; to--) {
            job->size[to] = job->size[to - 1], job->x_step[to] = job->x_step[to - 1];
            job->out_step[to] = job->out_step[to - 1], job->table_step[to] = job->table_step[to - 1];
        }
        job->size[to] = size, job->x_step[to] = x, job->out_step[to] = out, job->table_step[to] = table;
    }
    job->axes = kept;
}

/* Where many rows share one stretch of the table (the heads of a tensor in [heads, seq] order), walk a few tokens of all
 * of them before the next few, so that the table stays in the nearest cache. Returns the number of jobs: a remainder
 * that is no whole tile is a job of its own. */
static int in_tiles(Job *job, Job *rest) {
    int token = job->axes - 1, shared = job->axes - 2;
    if (shared < 0 || job->axes == MAX_AXES || job->table_step[token] == 0 || job->table_step[shared] != 0) return 1;
    int64_t bytes = job->table_step[token] < 0 ? -job->table_step[token] : job->table_step[token];
    int64_t tile = TILE_BYTES / (2 * bytes + 1);
    if (tile < 4 || job->size[token] < 2 * tile) return 1;
    int64_t tiles = job->size[token] / tile, left = job->size[token] % tile;
    *rest = *job;
    rest->rows = job->rows / job->size[token] * left, rest->size[token] = left;
    rest->x += tiles * tile * job->x_step[token], rest->out += tiles * tile * job->out_step[token];
    rest->cos += tiles * tile * job->table_step[token], rest->sin += tiles * tile * job->table_step[token];
    job->rows = job->rows / job->size[token] * tiles * tile;
    job->size[token + 1] = tile, job->x_step[token + 1] = job->x_step[token], job->out_step[token + 1] = job->out_step[token];
    job->table_step[token + 1] = job->table_step[token];
    job->size[token] = job->size[shared], job->x_step[token] = job->x_step[shared], job->out_step[token] = job->out_step[shared];
    job->table_step[token] = 0;
    job->size[shared] = tiles, job->x_step[shared] = tile * job->x_step[token + 1];
    job->out_step[shared] = tile * job->out_step[token + 1], job->table_step[shared] = tile * job->table_step[token + 1];
    job->axes++;
    return left ? 2 : 1;
}

/* Neighbouring heads that walk one stretch of the table become one row with a twin, where their number is even: the table
 * comes from the second cache. Heads that stand inside a token read it from the first, and two at a time are slower. */
static void in_twins(Job *job) {
    int shared = job->axes - 2;
    if (!job->turn.two || shared < 0 || job->table_step[shared] != 0 || job->size[shared] % 2) return;
    job->twins = 1, job->x_twin = job->x_step[shared], job->out_twin = job->out_step[shared];
    job->size[shared] /= 2, job->x_step[shared] *= 2, job->out_step[shared] *= 2, job->rows /= 2;
}

#define TENSOR 5 /* arguments of a tensor: x, out, shape, x strides, out strides */
#define TABLE 4  /* of a table: cos, sin, shape, strides */

static int read_job(PyObject *const *tensor, PyObject *const *table, Job *job, int dtype, int pairing, int64_t first,
                    int64_t head_axis, double sign) {
    int64_t shape[MAX_AXES + 1], x_stride[MAX_AXES + 1], out_stride[MAX_AXES + 1], size[MAX_AXES + 1], stride[MAX_AXES + 1];
    PyObject *const given[4] = {tensor[0], tensor[1], table[0], table[1]};
    void *address[4];
    for (int i = 0; i < 4; i++) {
        address[i] = PyLong_AsVoidPtr(given[i]);
        if (PyErr_Occurred()) return -1;
    }
    int axes = numbers(tensor[2], shape, MAX_AXES + 1), table_axes = axes < 0 ? -1 : numbers(table[2], size, MAX_AXES + 1);
    if (axes < 1 || table_axes < 1 || numbers(tensor[3], x_stride, MAX_AXES + 1) != axes ||
        numbers(tensor[4], out_stride, MAX_AXES + 1) != axes || numbers(table[3], stride, MAX_AXES + 1) != table_axes) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "rotate: shapes and strides of different lengths, or empty ones");
        return -1;
    }
    job->x = (const char *)address[0], job->out = (char *)address[1];
    job->cos = (const char *)address[2], job->sin = (const char *)address[3];
    job->stored = STORED_BYTES[dtype], job->turn = TURNS[pairing][dtype], job->twins = 0, job->sign = sign;
    job->channels = shape[axes - 1], job->pairs = size[table_axes - 1], job->first = first;
    job->axes = axes - 1, job->rows = 1;
    int spread = head_axis < 0 ? axes + (int)head_axis : -1;   /* the axis that the table lacks */
    int sequence = head_axis == -2 ? axes - 3 : axes - 2;       /* a table of one token does not spread over many */
    if (head_axis < 0 && (spread < 0 || table_axes < 2)) {
        PyErr_SetString(PyExc_ValueError, "rotate: the tensor has no axis of heads, or the table none of tokens");
        return -1;
    }
    int at = table_axes - 2;
    for (int axis = axes - 2; axis >= 0; axis--) {
        job->size[axis] = shape[axis], job->rows *= shape[axis];
        job->x_step[axis] = x_stride[axis] * job->stored, job->out_step[axis] = out_stride[axis] * job->stored;
        job->table_step[axis] = 0;
        if (axis == spread) continue;
        if (at >= 0) {
            if (size[at] != shape[axis] && (size[at] != 1 || (spread >= 0 && axis == sequence))) {
                PyErr_SetString(PyExc_ValueError, "rotate: the table does not spread over the tensor");
                return -1;
            }
            if (size[at] != 1) job->table_step[axis] = stride[at] * WIDE_BYTES[dtype];
            at--;
        }
    }
    if (at >= 0) {
        PyErr_SetString(PyExc_ValueError, "rotate: the table has more axes than the tensor");
        return -1;
    }
    if (first < 0 || job->pairs > job->channels / 2 || first > job->channels - 2 * job->pairs) {
        PyErr_SetString(PyExc_ValueError, "rotate: the turning channels do not lie in the tensor");
        return -1;
    }
    in_memory_order(job);
    return 0;
}

#define SETTINGS 5

/* rotate(dtype, interleaved, first, head_axis, transposed, one or two tensors, a table for each or one for both) */
static PyObject *rotate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    Job jobs[4];
    const int tensors = count == SETTINGS + TENSOR + TABLE ? 1 : 2, shared = count == SETTINGS + 2 * TENSOR + TABLE;
    if (tensors == 2 && !shared && count != SETTINGS + 2 * (TENSOR + TABLE)) {
        PyErr_SetString(PyExc_TypeError, "rotate: one or two tensors of five arguments, then tables of four, were expected");
        return NULL;
    }
    int64_t given[SETTINGS];
    for (int i = 0; i < SETTINGS; i++) {
        given[i] = PyLong_AsLongLong(args[i]);
        if (given[i] == -1 && PyErr_Occurred()) return NULL;
    }
    const int64_t dtype = given[0], pairing = given[1], first = given[2], head_axis = given[3], transposed = given[4];
    if (dtype < 0 || dtype > 3 || pairing < 0 || pairing > 1 || (head_axis != 0 && head_axis != -2 && head_axis != -3)) {
        PyErr_SetString(PyExc_ValueError, "rotate: an unknown dtype, pairing or axis of heads");
        return NULL;
    }
    Work work = {jobs, 0};
    int64_t rows = 0, bytes = 0;
    for (int i = 0; i < tensors; i++) {
        Job *job = &jobs[work.count];
        PyObject *const *tensor = args + SETTINGS + i * TENSOR;
        PyObject *const *table = args + SETTINGS + tensors * TENSOR + (shared ? 0 : i * TABLE);
        if (read_job(tensor, table, job, (int)dtype, (int)pairing, first, head_axis, transposed ? -1.0 : 1.0)) return NULL;
        bytes += job->rows * job->channels * job->stored;
        work.count += in_tiles(job, job + 1);
        for (; job < jobs + work.count; job++) {
            in_twins(job);
            rows += job->rows;
        }
    }
    if (bytes <= SERIAL_BYTES) {
        rotate_range(0, rows, &work);
        Py_RETURN_NONE;
    }
    int64_t grain = rows * SERIAL_BYTES / bytes + 1;
    int32_t failed = 0;
    PyThreadState *state = PyEval_SaveThread();
    if (parallel_for)
        failed = parallel_for(0, rows, grain, rotate_range, &work);
    else
        rotate_range(0, rows, &work);
    PyEval_RestoreThread(state);
    if (failed) {
        PyErr_SetString(PyExc_RuntimeError, "rotate: torch could not run its threads");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"rotate", (PyCFunction)(void (*)(void))rotate, METH_FASTCALL, "Rotate channel pairs of one or two tensors."},
    {"use_threads", use_threads, METH_O, "Take the address of torch_parallel_for."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_rotary", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rotary(void) {
#ifdef HALF_HARDWARE
    if (__builtin_cpu_supports("avx2")) { /* no processor has avx2 without f16c */
        widen = widen_hardware, narrow = narrow_hardware;
        TURNS[0][2] = (Turn){half_bfloat_in_lanes, half_bfloat_in_lanes_twice};
    }
#endif
    return PyModuleDef_Init(&MODULE);
}
