/* AdamW on bf16 weights, gradients and moments in one pass: the rules of any_precision_rules.py, with the same roundings up to fused products.
 *
 * Each rule is written once, in terms of W lanes: 32 with AVX-512 and its bf16 instructions, else 1, which compilers vectorise.
 * The 32 are two registers of 16, for even and for odd places: so bf16 becomes float32 and back in half as many instructions,
 * which is what bounds the rules (not division, not memory).
 * Compile with -ffp-contract=off: products and sums are fused only where it says so, and only with AVX-512.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define W 32
typedef struct { __m512 a, b; } F; /* of elements at even and at odd places */
typedef struct { __m512i a, b; } I;
static inline F set(float x) { __m512 y = _mm512_set1_ps(x); return (F){y, y}; }
static inline F add(F x, F y) { return (F){_mm512_add_ps(x.a, y.a), _mm512_add_ps(x.b, y.b)}; }
static inline F sub(F x, F y) { return (F){_mm512_sub_ps(x.a, y.a), _mm512_sub_ps(x.b, y.b)}; }
static inline F mul(F x, F y) { return (F){_mm512_mul_ps(x.a, y.a), _mm512_mul_ps(x.b, y.b)}; }
static inline F muladd(F x, F y, F z) { return (F){_mm512_fmadd_ps(x.a, y.a, z.a), _mm512_fmadd_ps(x.b, y.b, z.b)}; }
static inline F divide(F x, F y) { return (F){_mm512_div_ps(x.a, y.a), _mm512_div_ps(x.b, y.b)}; }
static inline F root(F x) { return (F){_mm512_sqrt_ps(x.a), _mm512_sqrt_ps(x.b)}; }
static inline I bits(F x) { return (I){_mm512_castps_si512(x.a), _mm512_castps_si512(x.b)}; }
static inline F floats(I x) { return (F){_mm512_castsi512_ps(x.a), _mm512_castsi512_ps(x.b)}; }
static inline I iset(uint32_t x) { __m512i y = _mm512_set1_epi32((int)x); return (I){y, y}; }
static inline I iadd(I x, I y) { return (I){_mm512_add_epi32(x.a, y.a), _mm512_add_epi32(x.b, y.b)}; }
static inline I isub(I x, I y) { return (I){_mm512_sub_epi32(x.a, y.a), _mm512_sub_epi32(x.b, y.b)}; }
static inline I iand(I x, I y) { return (I){_mm512_and_si512(x.a, y.a), _mm512_and_si512(x.b, y.b)}; }
static inline I ixor(I x, I y) { return (I){_mm512_xor_si512(x.a, y.a), _mm512_xor_si512(x.b, y.b)}; }
static inline I imul(I x, I y) { return (I){_mm512_mullo_epi32(x.a, y.a), _mm512_mullo_epi32(x.b, y.b)}; }
#define SHR(x, k) ((I){_mm512_srli_epi32((x).a, k), _mm512_srli_epi32((x).b, k)})
#define SHL(x, k) ((I){_mm512_slli_epi32((x).a, k), _mm512_slli_epi32((x).b, k)})
static inline I lanes(uint32_t first) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return iadd(iset(first), (I){even, _mm512_add_epi32(even, _mm512_set1_epi32(1))});
}
static inline F apart(__m512i x) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    return (F){_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_and_si512(x, upper))};
}
static inline __m512i together(F x) { /* rounded to nearest; the instruction puts all of x.a before all of x.b */
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(x.b, x.a));
}
static inline F load(const uint16_t *p) { return apart(_mm512_loadu_si512((const void *)p)); }
static inline void store(uint16_t *p, F x) { _mm512_storeu_si512((void *)p, together(x)); }
static inline F rounded(F x) { return apart(together(x)); }
static inline void store_high(uint16_t *p, I x) {
    _mm512_storeu_si512((void *)p, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(x.a, 16), x.b));
}
static inline I load_byte(const uint8_t *p) {
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)p));
    return (I){_mm512_and_si512(x, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(x, 16)};
}
static inline void store_byte(uint8_t *p, I x) {
    _mm256_storeu_si256((void *)p, _mm512_cvtepi16_epi8(_mm512_or_si512(x.a, _mm512_slli_epi32(x.b, 16))));
}
#define AHEAD(p) _mm_prefetch((const char *)(p) + 256, _MM_HINT_T0)
#else
#define W 1
typedef float F;
typedef uint32_t I;
static inline F set(float x) { return x; }
static inline F add(F a, F b) { return a + b; }
static inline F sub(F a, F b) { return a - b; }
static inline F mul(F a, F b) { return a * b; }
static inline F muladd(F a, F b, F c) { return a * b + c; }
static inline F divide(F a, F b) { return a / b; }
static inline F root(F a) { return sqrtf(a); }
static inline I bits(F a) { I b; memcpy(&b, &a, 4); return b; }
static inline F floats(I a) { F b; memcpy(&b, &a, 4); return b; }
static inline I iset(uint32_t x) { return x; }
static inline I iadd(I a, I b) { return a + b; }
static inline I isub(I a, I b) { return a - b; }
static inline I iand(I a, I b) { return a & b; }
static inline I ixor(I a, I b) { return a ^ b; }
static inline I imul(I a, I b) { return a * b; }
#define SHR(a, k) ((a) >> (k))
#define SHL(a, k) ((a) << (k))
static inline I lanes(uint32_t first) { return first; }
static inline I nearest(F a) { I b = bits(a); return b + 0x7fff + ((b >> 16) & 1); }
static inline F load(const uint16_t *p) { return floats((I)*p << 16); }
static inline void store_high(uint16_t *p, I a) { *p = (uint16_t)(a >> 16); }
static inline void store(uint16_t *p, F a) { store_high(p, nearest(a)); }
static inline F rounded(F a) { return floats(nearest(a) & 0xffff0000u); }
static inline I load_byte(const uint8_t *p) { return *p; }
static inline void store_byte(uint8_t *p, I a) { *p = (uint8_t)a; }
#define AHEAD(p) ((void)0)
#endif

enum { NONE, KAHAN, SPLIT, STOCHASTIC };

typedef struct { const float *s; uint32_t key0, key1; } Setting;

static inline I random_bits(uint32_t place, Setting t) {
    I x = iadd(lanes(place), iset(t.key0));
    x = ixor(x, SHR(x, 16));
    x = ixor(imul(x, iset(0x7feb352du)), iset(t.key1));
    x = ixor(x, SHR(x, 15));
    x = imul(x, iset(0x846ca68bu));
    return ixor(x, SHR(x, 16));
}

/* W elements. `kept`: compensation or nothing; `lower`, `lowest`: of split; `place`: of the first among those that share a key. */
static inline __attribute__((always_inline)) void rule(
    int kind, int noisy, uint16_t *restrict w, const uint16_t *restrict g, uint16_t *restrict m, uint16_t *restrict v,
    uint16_t *restrict kept, uint8_t *restrict lower, uint8_t *restrict lowest, uint32_t place, Setting t)
{
    const float *s = t.s;
    F gw = load(g), mw = load(m), vw = load(v), old = load(w), d;
    I chance = (noisy || kind == STOCHASTIC) ? random_bits(place, t) : iset(0);
    mw = muladd(sub(gw, mw), set(s[0]), mw);
    vw = muladd(vw, set(s[1]), mul(mul(gw, set(s[2])), gw));
    d = divide(mul(mw, set(s[5])), add(root(vw), set(s[3])));
    if (kind == KAHAN) {
        F u = add(load(kept), muladd(old, set(-s[4]), d)), sum = add(old, u);
        store(w, sum);
        store(kept, mul(add(u, sub(old, rounded(sum))), set(s[7])));
    } else if (kind == SPLIT) {
        I left = isub(iadd(SHL(load_byte(lower), 8), load_byte(lowest)), iset(0x8000)), whole, high;
        old = floats(iadd(bits(old), left));
        whole = bits(muladd(old, set(s[6]), d));
        high = iand(iadd(whole, iset(0x8000)), iset(0xffff0000u));
        left = iadd(isub(whole, high), iset(0x8000));
        store_high(w, high);
        store_byte(lower, SHR(left, 8));
        store_byte(lowest, iand(left, iset(0xff)));
    } else {
        F now = muladd(old, set(s[6]), d);
        if (kind == STOCHASTIC) store_high(w, iadd(bits(now), iand(chance, iset(0xffff))));
        else store(w, now);
    }
    store(m, mw);
    if (noisy) store_high(v, iadd(bits(vw), SHR(chance, 16)));
    else store(v, vw);
}

static inline __attribute__((always_inline)) void walk(
    int kind, int noisy, int64_t n, uint16_t *w, const uint16_t *g, uint16_t *m, uint16_t *v, void *kept, uint8_t *lowest,
    uint32_t place, Setting t)
{
    uint16_t *c = kind == KAHAN ? kept : 0;
    uint8_t *a = kind == SPLIT ? kept : 0, *b = kind == SPLIT ? lowest : 0;
    const float s[8] = {t.s[0], t.s[1], t.s[2], t.s[3], t.s[4], t.s[5], t.s[6], t.s[7]};
    int64_t i = 0;
    t.s = s;
    for (; i + W <= n; i += W) {
        AHEAD(w + i), AHEAD(g + i), AHEAD(m + i), AHEAD(v + i);
        if (c) AHEAD(c + i);
        if (a) AHEAD(a + i), AHEAD(b + i);
        rule(kind, noisy, w + i, g + i, m + i, v + i, c + i, a + i, b + i, place + (uint32_t)i, t);
    }
#if W > 1
    if (i < n) { /* the rest, in memory that is long enough */
        uint16_t x[5][W] = {{0}};
        uint8_t y[2][W] = {{0}};
        size_t rest = (size_t)(n - i), size = 2 * rest;
        memcpy(x[0], w + i, size); memcpy(x[1], g + i, size); memcpy(x[2], m + i, size); memcpy(x[3], v + i, size);
        if (c) memcpy(x[4], c + i, size);
        if (a) { memcpy(y[0], a + i, rest); memcpy(y[1], b + i, rest); }
        rule(kind, noisy, x[0], x[1], x[2], x[3], x[4], y[0], y[1], place + (uint32_t)i, t);
        memcpy(w + i, x[0], size); memcpy(m + i, x[2], size); memcpy(v + i, x[3], size);
        if (c) memcpy(c + i, x[4], size);
        if (a) { memcpy(a + i, y[0], rest); memcpy(b + i, y[1], rest); }
    }
#endif
}

/* n elements; s: eight scalars; key: two words; place: of the first element among those that share the key. */
void ipu_lean_adamw(
    int kind, int noisy, int64_t n, uint16_t *w, const uint16_t *g, uint16_t *m, uint16_t *v, void *kept, uint8_t *lowest,
    const float *s, uint32_t key0, uint32_t key1, uint32_t place)
{
    Setting t = {s, key0, key1};
    switch (2 * kind + (noisy != 0)) {
    case 2 * NONE: walk(NONE, 0, n, w, g, m, v, kept, lowest, place, t); break;
    case 2 * NONE + 1: walk(NONE, 1, n, w, g, m, v, kept, lowest, place, t); break;
    case 2 * KAHAN: walk(KAHAN, 0, n, w, g, m, v, kept, lowest, place, t); break;
    case 2 * KAHAN + 1: walk(KAHAN, 1, n, w, g, m, v, kept, lowest, place, t); break;
    case 2 * SPLIT: walk(SPLIT, 0, n, w, g, m, v, kept, lowest, place, t); break;
    case 2 * SPLIT + 1: walk(SPLIT, 1, n, w, g, m, v, kept, lowest, place, t); break;
    case 2 * STOCHASTIC: walk(STOCHASTIC, 0, n, w, g, m, v, kept, lowest, place, t); break;
    default: walk(STOCHASTIC, 1, n, w, g, m, v, kept, lowest, place, t);
    }
}
