// What every generated unit starts with: types, branch-free math, threads. No header is included.
// The float functions are written so that a compiler turns a loop over them into vector code; they
// stay within 2 units in the last place of the exact value. Polynomials are minimax fits.
typedef unsigned char u8; typedef signed char i8; typedef unsigned short u16; typedef short i16;
typedef int i32; typedef unsigned int u32; typedef long i64; typedef unsigned long u64;
typedef float f32; typedef double f64;
#define INLINE static inline __attribute__((always_inline))
// Functions and data that the parts of a unit share, where it is compiled in several.
#define SHARED __attribute__((visibility("hidden")))
// ONCE is not to be copied into its callers, of which there are many. CALLS does nothing but call.
#if defined(__clang__)
#define ONCE __attribute__((noinline))
#define CALLS
#else
#define ONCE __attribute__((noinline, noclone))
#define CALLS __attribute__((optimize("O1")))
#endif
#define INF __builtin_inff()
#define NAN_ __builtin_nanf("")

INLINE f32 bits_f(u32 x) { return __builtin_bit_cast(f32, x); }
INLINE u32 bits_u(f32 x) { return __builtin_bit_cast(u32, x); }
INLINE f32 from_bf16(u16 x) { return bits_f((u32)x << 16); }
INLINE u16 to_bf16(f32 x) {
  u32 b = bits_u(x);
  u32 r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return (u16)(x != x ? 0x7fc0u : r);
}
INLINE f32 from_f16(u16 x) {
  u32 m = (u32)(x & 0x7fff) << 13;
  f32 v = bits_f(m) * bits_f(0x77800000u);  // 2^112 puts the exponent right, subnormals included
  u32 special = (x & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return bits_f(bits_u(v) | special | ((u32)(x & 0x8000) << 16));
}
INLINE u16 to_f16(f32 x) {
  u32 sign = (bits_u(x) >> 16) & 0x8000u, a = bits_u(x) & 0x7fffffffu;
  u32 normal = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
  u32 small = bits_u(bits_f(a) + 0.5f) - 0x3f000000u;  // the addition rounds to a subnormal
  u32 r = a < 0x38800000u ? small : normal;
  r = a >= 0x477ff000u ? 0x7c00u : r;
  r = a > 0x7f800000u ? 0x7e00u : r;
  return (u16)(r | sign);
}
INLINE f32 round_bf16(f32 x) { return from_bf16(to_bf16(x)); }
INLINE f32 round_f16(f32 x) { return from_f16(to_f16(x)); }

INLINE f32 u_abs(f32 x) { return __builtin_fabsf(x); }
INLINE f64 u_abs(f64 x) { return __builtin_fabs(x); }
INLINE i64 u_abs(i64 x) { return x < 0 ? (i64)(0 - (u64)x) : x; }
INLINE i32 u_abs(i32 x) { return x < 0 ? (i32)(0 - (u32)x) : x; }
INLINE i16 u_abs(i16 x) { return (i16)(x < 0 ? -x : x); }
INLINE i8 u_abs(i8 x) { return (i8)(x < 0 ? -x : x); }
INLINE f32 u_sqrt(f32 x) { return __builtin_sqrtf(x); }
INLINE f64 u_sqrt(f64 x) { return __builtin_sqrt(x); }
template <class T> INLINE T u_rsqrt(T x) { return (T)1 / u_sqrt(x); }
template <class T> INLINE T u_reciprocal(T x) { return (T)1 / x; }
INLINE f32 u_floor(f32 x) { return __builtin_floorf(x); }
INLINE f32 u_ceil(f32 x) { return __builtin_ceilf(x); }
INLINE f32 u_trunc(f32 x) { return __builtin_truncf(x); }
INLINE f32 u_round(f32 x) { return __builtin_rintf(x); }
INLINE f64 u_floor(f64 x) { return __builtin_floor(x); }
INLINE f64 u_ceil(f64 x) { return __builtin_ceil(x); }
INLINE f64 u_trunc(f64 x) { return __builtin_trunc(x); }
INLINE f64 u_round(f64 x) { return __builtin_rint(x); }
INLINE f32 u_copysign(f32 x, f32 y) { return __builtin_copysignf(x, y); }
INLINE f64 u_copysign(f64 x, f64 y) { return __builtin_copysign(x, y); }

INLINE bool u_signbit(f32 x) { return (i32)bits_u(x) < 0; }
INLINE bool u_signbit(f64 x) { return __builtin_bit_cast(i64, x) < 0; }

// x * 2^n for -252 <= n <= 254, in two steps so that subnormal results are right
INLINE f32 scale2(f32 x, i32 n) {
  i32 h = n >> 1;
  return x * bits_f((u32)(h + 127) << 23) * bits_f((u32)(n - h + 127) << 23);
}
// exp(x - n log 2) for whole n next to x / log 2
INLINE f32 exp_rest(f32 x, f32 n) {
  f32 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  f32 p = 0.000199089045f;
  p = p * r + 0.00139345438f;
  p = p * r + 0.00833328441f;
  p = p * r + 0.0416664556f;
  p = p * r + 0.166666672f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p;
}
INLINE f32 u_exp(f32 x) {
  f32 c = x > 89.0f ? 89.0f : x;
  c = c < -104.0f ? -104.0f : c;
  f32 t = c * 1.44269504f + 12582912.0f, n = t - 12582912.0f;
  f32 p = exp_rest(c, n);
  // n is in the low bits of t; it goes into two factors, so that subnormal results are right
  u32 b = bits_u(t), h = (b << 22) & 0xff800000u, g = (b << 23) - h;
  return p * bits_f(h + 0x3f800000u) * bits_f(g + 0x3f800000u);  // a NaN has come through p
}
// exp where the result is a normal number for certain
INLINE f32 exp_near(f32 x) {
  f32 t = x * 1.44269504f + 12582912.0f, n = t - 12582912.0f;
  f32 p = exp_rest(x, n);
  return bits_f(bits_u(p) + (bits_u(t) << 23));
}
INLINE f32 u_exp2(f32 x) {
  f32 c = x > 129.0f ? 129.0f : x;
  c = c < -151.0f ? -151.0f : c;
  f32 n = (c + 12582912.0f) - 12582912.0f;
  f32 r = (c - n) * 0.693147181f;
  f32 p = 0.000199089045f;
  p = p * r + 0.00139345438f;
  p = p * r + 0.00833328441f;
  p = p * r + 0.0416664556f;
  p = p * r + 0.166666672f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  f32 y = scale2(p, (i32)n);
  return x != x ? x : y;
}
INLINE f32 u_expm1(f32 x) {
  f32 p = 2.49397417e-05f;
  p = p * x + 0.000199448827f;
  p = p * x + 0.00138886832f;
  p = p * x + 0.00833323598f;
  p = p * x + 0.0416666679f;
  p = p * x + 0.166666672f;
  f32 small = p * x * x * x + 0.5f * x * x + x;
  f32 large = u_exp(x) - 1.0f;
  f32 y = u_abs(x) < 0.5f ? small : large;
  return x == 0.0f ? x : y;
}
// log of 2^k (1 + f)
INLINE f32 log_of(f32 f, f32 k) {
  f32 p = 0.0733419582f;
  p = p * f + -0.116617538f;
  p = p * f + 0.116348743f;
  p = p * f + -0.123964667f;
  p = p * f + 0.142511144f;
  p = p * f + -0.166691601f;
  p = p * f + 0.200006887f;
  p = p * f + -0.249999806f;
  p = p * f + 0.333333313f;
  f32 z = f * f;
  f32 y = p * z * f + k * -2.12194440e-4f;
  return ((y - 0.5f * z) + f) + k * 0.693359375f;
}
INLINE f32 u_log(f32 x) {
  bool tiny = x < 1.17549435e-38f;
  u32 b = bits_u(tiny ? x * 8388608.0f : x) + (0x3f800000u - 0x3f3504f3u);
  f32 k = (f32)((i32)(b >> 23) - 127 - (tiny ? 23 : 0));
  f32 f = bits_f((b & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  f32 y = log_of(f, k);
  y = x == INF ? x : y;
  y = x == 0.0f ? -INF : y;
  return (x < 0.0f) | (x != x) ? NAN_ : y;
}
INLINE f32 u_log2(f32 x) {
  bool tiny = x < 1.17549435e-38f;
  u32 b = bits_u(tiny ? x * 8388608.0f : x) + (0x3f800000u - 0x3f3504f3u);
  f32 k = (f32)((i32)(b >> 23) - 127 - (tiny ? 23 : 0));
  f32 f = bits_f((b & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  f32 y = (f32)((f64)log_of(f, 0.0f) * 1.4426950408889634) + k;
  y = x == INF ? x : y;
  y = x == 0.0f ? -INF : y;
  return (x < 0.0f) | (x != x) ? NAN_ : y;
}
INLINE f32 u_log10(f32 x) { return (f32)((f64)u_log2(x) * 0.30102999566398120); }
INLINE f32 u_log1p(f32 x) {
  f32 u = 1.0f + x;
  f32 lost = u_abs(x) < 1.0f ? x - (u - 1.0f) : 1.0f - (u - x);
  f32 y = u_log(u) + lost / u;
  y = u_abs(x) < 5.9e-8f ? x : y;
  y = x == INF ? x : y;
  return x == -1.0f ? -INF : y;
}
// 1 / (1 + exp(-x)). With exp(-x) = 2h (1 + r q), h a power of two and p = 2q, the sum is put together as
// 2h + (h r p + 1): were 1 added to the exponential once that is rounded, then from 2^24 to 2^25 all sums
// would be halfway between two numbers, and an exponential that differs by one unit would make one that
// differs by two. h is half of the power, which alone may be too large for a number; the sum is infinite
// where it should be. For large x it is 1, whatever h is.
INLINE f32 u_sigmoid(f32 x) {
  f32 c = x < -89.0f ? -89.0f : x;
  c = c > 87.0f ? 87.0f : c;
  f32 t = c * -1.44269504f + 12583038.0f, n = t - 12583038.0f;  // its low bits are the exponent of h
  f32 r = (-c - n * 0.693359375f) + n * 2.12194440e-4f, h = bits_f(bits_u(t) << 23);
  f32 p = 2 * 0.000199089045f;
  p = p * r + 2 * 0.00139345438f;
  p = p * r + 2 * 0.00833328441f;
  p = p * r + 2 * 0.0416664556f;
  p = p * r + 2 * 0.166666672f;
  p = p * r + 1.0f;
  p = p * r + 2.0f;
  return 1.0f / (h * 2.0f + (h * r * p + 1.0f));
}
INLINE f32 u_tanh(f32 x) {
  f32 a = u_abs(x), z = x * x;
  f32 p = 0.00227591093f;
  p = p * z + -0.00832960848f;
  p = p * z + 0.0217647552f;
  p = p * z + -0.0539587848f;
  p = p * z + 0.133333012f;
  p = p * z + -0.333333343f;
  f32 small = p * z * x + x;
  f32 c = a > 10.0f ? 10.0f : a;
  f32 large = 1.0f - 2.0f / (exp_near(c + c) + 1.0f);
  large = x != x ? x : large;
  return u_copysign(a < 0.625f ? small : large, x);
}
INLINE f32 u_erf(f32 x) {
  f32 a = u_abs(x), z = x * x;
  f32 p = -9.68013774e-06f;
  p = p * z + 0.000112705449f;
  p = p * z + -0.000848471129f;
  p = p * z + 0.00522107491f;
  p = p * z + -0.0268654451f;
  p = p * z + 0.112837829f;
  p = p * z + -0.376126379f;
  p = p * z + 0.128379167f;  // less one, so that the last addition is exact enough
  f32 c = a > 4.0f ? 4.0f : a;
  f32 q = 2.51326497e-07f;
  q = q * c + -2.53148064e-05f;
  q = q * c + 0.000463788019f;
  q = q * c + -0.00428238278f;
  q = q * c + 0.0253735557f;
  q = q * c + -0.108638994f;
  q = q * c + -0.633039594f;
  q = q * c + -1.1296612f;
  q = q * c + 0.000204359865f;
  f32 large = u_copysign(1.0f - exp_near(q), x);
  f32 y = a < 1.0f ? p * x + x : large;
  return x != x ? x : y;
}
// The reduction is in double with pi/2 in two parts: exact enough up to 2^45.
INLINE f32 sin_cos(f32 x, i64 quarter) {
  f64 d = x;
  f64 n = (d * 0.63661977236758134 + 6755399441055744.0) - 6755399441055744.0;
  f64 w = (d - n * 1.5707963267948966) - n * 6.123233995736766e-17;
  i64 q = ((i64)n + quarter) & 3;
  f32 r = (f32)w, z = r * r;
  f32 s = 2.7246947e-06f;
  s = s * z + -0.000198400638f;
  s = s * z + 0.00833333191f;
  s = s * z + -0.166666672f;
  s = s * z * r + r;
  f32 c = -4.91537207e-07f;
  c = c * z + 2.50051125e-05f;
  c = c * z + -0.00138893665f;
  c = c * z + 0.0416666679f;
  c = c * z * z - 0.5f * z + 1.0f;
  f32 y = q & 1 ? c : s;
  y = q & 2 ? -y : y;
  return x - x == 0.0f ? y : NAN_;
}
INLINE f32 u_sin(f32 x) { return x == 0.0f ? x : sin_cos(x, 0); }
INLINE f32 u_cos(f32 x) { return sin_cos(x, 1); }
// Beyond that the library's, which are no vectors: loops look for such arguments before they run.
INLINE bool is_far(f32 x) { return u_abs(x) > 35184372088832.0f; }
INLINE f32 far_sin(f32 x) { return is_far(x) ? __builtin_sinf(x) : u_sin(x); }
INLINE f32 far_cos(f32 x) { return is_far(x) ? __builtin_cosf(x) : u_cos(x); }
INLINE f64 far_sin(f64 x) { return __builtin_sin(x); }
INLINE f64 far_cos(f64 x) { return __builtin_cos(x); }

#define LIBM1(name) \
  INLINE f32 u_##name(f32 x) { return __builtin_##name##f(x); } \
  INLINE f64 u_##name(f64 x) { return __builtin_##name(x); }
#define LIBM1D(name) INLINE f64 u_##name(f64 x) { return __builtin_##name(x); }
LIBM1(tan) LIBM1(asin) LIBM1(acos) LIBM1(atan) LIBM1(sinh) LIBM1(cosh) LIBM1(asinh) LIBM1(acosh)
LIBM1(atanh) LIBM1(erfc) LIBM1(lgamma)
LIBM1D(exp) LIBM1D(exp2) LIBM1D(expm1) LIBM1D(log) LIBM1D(log2) LIBM1D(log10) LIBM1D(log1p)
LIBM1D(tanh) LIBM1D(erf) LIBM1D(sin) LIBM1D(cos)
INLINE f64 u_sigmoid(f64 x) { return 1.0 / (1.0 + u_exp(-x)); }
// 2^(y log2 |x|) in double, which leaves nothing to correct; then the cases that IEEE names.
INLINE f32 u_pow(f32 x, f32 y) {
  f64 a = u_abs(x), e = y;
  u64 b = __builtin_bit_cast(u64, a) + (0x3ff0000000000000ul - 0x3fe6a09e667f3bcdul);
  f64 k = (f64)((i32)(b >> 52) - 1023);
  f64 m = __builtin_bit_cast(f64, (b & 0xffffffffffffful) + 0x3fe6a09e667f3bcdul);
  f64 s = (m - 1.0) / (m + 1.0), z = s * s;
  f64 p = 1.0 / 15.0;
  p = p * z + 1.0 / 13.0;
  p = p * z + 1.0 / 11.0;
  p = p * z + 1.0 / 9.0;
  p = p * z + 1.0 / 7.0;
  p = p * z + 0.2;
  p = p * z + 1.0 / 3.0;
  f64 l = k + (p * z * s + s) * 2.8853900817779268;  // 2 / log 2
  l = a == 0.0 ? -(f64)INF : a == (f64)INF ? (f64)INF : l;
  f64 t = (a == 1.0) & (y == y) ? 0.0 : e * l;
  t = t > 140.0 ? 140.0 : t;
  t = t < -160.0 ? -160.0 : t;
  f64 w = t + 6755399441055744.0, r = t - (w - 6755399441055744.0);
  f64 q = 1.0178086009239699e-7;
  q = q * r + 1.3215486790144307e-6;
  q = q * r + 1.5252733804059841e-5;
  q = q * r + 1.5403530393381609e-4;
  q = q * r + 1.3333558146428443e-3;
  q = q * r + 9.6181291076284772e-3;
  q = q * r + 5.5504108664821580e-2;
  q = q * r + 2.4022650695910072e-1;
  q = q * r + 6.9314718055994531e-1;
  q = q * r + 1.0;
  u64 scaled = __builtin_bit_cast(u64, q) + (__builtin_bit_cast(u64, w) << 52);
  f32 v = (f32)(t == t ? __builtin_bit_cast(f64, scaled) : t);
  f32 half = y * 0.5f;
  bool whole = u_floor(y) == y, odd = whole & (u_floor(half) != half);
  v = odd ? u_copysign(v, x) : v;
  v = (x < 0.0f) & (x > -INF) & !whole ? NAN_ : v;
  v = (x != x) | (y != y) ? NAN_ : v;
  return (y == 0.0f) | (x == 1.0f) ? 1.0f : v;
}
INLINE f64 u_pow(f64 x, f64 y) { return __builtin_pow(x, y); }
INLINE f32 u_atan2(f32 x, f32 y) { return __builtin_atan2f(x, y); }
INLINE f64 u_atan2(f64 x, f64 y) { return __builtin_atan2(x, y); }
INLINE f32 u_hypot(f32 x, f32 y) { return __builtin_hypotf(x, y); }
INLINE f64 u_hypot(f64 x, f64 y) { return __builtin_hypot(x, y); }
INLINE f32 u_nextafter(f32 x, f32 y) { return __builtin_nextafterf(x, y); }
INLINE f64 u_nextafter(f64 x, f64 y) { return __builtin_nextafter(x, y); }
INLINE f32 u_fmod(f32 x, f32 y) { return __builtin_fmodf(x, y); }
INLINE f64 u_fmod(f64 x, f64 y) { return __builtin_fmod(x, y); }

template <class T> INLINE T u_max(T a, T b) { return (a > b) | (a != a) ? a : b; }
template <class T> INLINE T u_min(T a, T b) { return (a < b) | (a != a) ? a : b; }
template <class T> INLINE T u_fmax(T a, T b) { return (a >= b) | (b != b) ? a : b; }
template <class T> INLINE T u_fmin(T a, T b) { return (a <= b) | (b != b) ? a : b; }
template <class T> INLINE T log_add_exp(T x, T y) {  // of an element and what is carried along
  T a = (y < x) | (y != y) ? y : x, b = (x < y) | (y != y) ? y : x;
  return (a != b) | (u_abs(a) < (T)INF) ? u_log1p(u_exp(a - b)) + b : x;
}
template <class T> INLINE T u_sign(T x) { return (T)((x > (T)0) - (x < (T)0)); }
template <class T> INLINE T u_remainder(T a, T b) {
  T m = u_fmod(a, b);
  return (m != (T)0) & ((b < (T)0) != (m < (T)0)) ? m + b : m;
}
template <class T> INLINE T u_floordiv(T a, T b) {
  T m = u_fmod(a, b), d = (a - m) / b;
  d = (m != (T)0) & ((b < (T)0) != (m < (T)0)) ? d - (T)1 : d;
  T f = u_floor(d);
  f = d - f > (T)0.5 ? f + (T)1 : f;
  f = d == (T)0 ? u_copysign((T)0, a / b) : f;
  return b == (T)0 ? a / b : f;
}
// Integers. The least of them divided by -1 has no quotient in C++; here it wraps round.
template <class T> INLINE T i_div(T a, T b) {
  return b == (T)-1 && (T)-1 < (T)0 ? (T)(0 - (u64)a) : (T)(a / b);
}
template <class T> INLINE T i_fmod(T a, T b) {
  return b == (T)-1 && (T)-1 < (T)0 ? (T)0 : (T)(a % b);
}
template <class T> INLINE T i_floordiv(T a, T b) {
  return (T)(i_div(a, b) - ((i_fmod(a, b) != 0) & ((a < 0) != (b < 0))));
}
template <class T> INLINE T i_remainder(T a, T b) {
  T r = i_fmod(a, b);
  return (T)(r + ((r != 0) & ((r < 0) != (b < 0)) ? b : (T)0));
}
// Shifts by less than nothing, or by as many bits as there are, leave nothing but the sign.
template <class T> INLINE T i_lshift(T a, T b) {
  bool in = (b >= (T)0) & (b < (T)(8 * sizeof(T)));
  return in ? (T)((u64)a << (in ? b : (T)0)) : (T)0;
}
template <class T> INLINE T i_rshift(T a, T b) {
  bool in = (b >= (T)0) & (b < (T)(8 * sizeof(T)));
  return in ? (T)(a >> (in ? b : (T)0)) : (T)(a < (T)0 ? -1 : 0);
}
template <class T> INLINE T i_pow(T a, T b) {
  if (b < (T)0) return (T)(a == (T)1 ? 1 : a == (T)-1 ? (b & 1 ? -1 : 1) : 0);
  u64 found = 1, square = (u64)a;
  for (u64 n = (u64)b; n; n >>= 1) { found = n & 1 ? found * square : found; square *= square; }
  return (T)found;
}
template <class T> INLINE T i_gcd(T a, T b) {
  T x = (T)(a < (T)0 ? 0 - (u64)a : (u64)a), y = (T)(b < (T)0 ? 0 - (u64)b : (u64)b);
  while (x) { T z = x; x = i_fmod(y, x); y = z; }
  return y;
}
template <class T> INLINE T i_lcm(T a, T b) {
  T g = i_gcd(a, b);
  u64 m = g ? (u64)i_div(a, g) * (u64)b : 0;
  // C++ has the product of short integers in 32 bits, and eager takes its sign there
  bool is_less = sizeof(T) < 4 ? (i32)m < 0 : (T)m < (T)0;
  return (T)(is_less ? 0 - m : m);
}

// Philox 4x32-10 (Salmon et al., 2011): random bits as a function of a key and a counter.
struct Bits { u32 a, b; };
INLINE Bits philox(i64 key, i64 at, i64 stream) {
  u32 k0 = (u32)key, k1 = (u32)((u64)key >> 32);
  u32 c0 = (u32)at, c1 = (u32)((u64)at >> 32), c2 = (u32)stream, c3 = 0;
  for (int r = 0; r < 10; ++r) {
    u64 p = (u64)0xD2511F53u * c0, q = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(q >> 32) ^ c1 ^ k0; c1 = (u32)q;
    c2 = (u32)(p >> 32) ^ c3 ^ k1; c3 = (u32)p;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  Bits bits = {c0, c1};
  return bits;
}
INLINE f32 u_uniform(i64 key, i64 at, i64 stream) {
  return (f32)(i32)(philox(key, at, stream).a >> 8) * 0x1p-24f;
}
INLINE f64 u_uniform64(i64 key, i64 at, i64 stream) {  // of 53 bits
  Bits bits = philox(key, at, stream);
  return ((f64)(i64)(bits.a >> 5) * 67108864.0 + (f64)(i64)(bits.b >> 6)) * 0x1p-53;
}
// One of `count` integers from `low` on: the high half of the product of `count` and random bits.
INLINE i64 u_integers(i64 key, i64 at, i64 stream, i64 low, i64 count) {
  Bits bits = philox(key, at, stream);
  u64 many = (u64)count, all = (u64)bits.a << 32 | bits.b;
  u64 found = many >> 32 ? (u64)((unsigned __int128)all * many >> 64) : bits.a * many >> 32;
  return (i64)((u64)low + found);
}
INLINE f32 u_normal(i64 key, i64 at, i64 stream) {
  Bits bits = philox(key, at, stream);
  f32 u = (f32)(i32)((bits.a >> 8) + 1) * 0x1p-24f, v = (f32)(i32)(bits.b >> 8) * 0x1p-24f;
  return u_sqrt(-2.0f * u_log(u)) * u_cos(6.28318530718f * v);
}
INLINE f64 u_normal64(i64 key, i64 at, i64 stream) {
  Bits bits = philox(key, at, stream);
  f64 u = ((f64)(i64)bits.a + 1.0) * 0x1p-32, v = (f64)(i64)bits.b * 0x1p-32;
  return u_sqrt(-2.0 * u_log(u)) * u_cos(6.283185307179586 * v);
}

// A tile of `rows` rows with `step` from one to the next, its columns as rows of N elements.
template <int N, class T>
INLINE void turn_tile(const T *from, i64 step, T *to, i64 rows, i64 columns) {
  for (i64 i = 0; i < rows; ++i)
    for (i64 k = 0; k < columns; ++k) to[k * N + i] = from[i * step + k];
}
#if defined(__AVX512F__) && !defined(__clang__)
typedef f32 Vector __attribute__((vector_size(64), may_alias));
typedef f32 Loosely __attribute__((vector_size(64), aligned(4), may_alias));
typedef i32 Places __attribute__((vector_size(64), may_alias));
// Four rounds of laying the upper half of the rows between the lower one turn 16 by 16 round.
INLINE void lay_between(const Vector *a, Vector *b) {
  const Places low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Places high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  for (int k = 0; k < 8; ++k) {
    b[2 * k] = __builtin_shuffle(a[k], a[k + 8], low);
    b[2 * k + 1] = __builtin_shuffle(a[k], a[k + 8], high);
  }
}
template <int N> INLINE void turn_tile(const f32 *from, i64 step, f32 *to, i64 rows, i64 columns) {
  i64 i = 0;
  for (; i + 16 <= rows; i += 16) {
    i64 k = 0;
    for (; k + 16 <= columns; k += 16) {
      Vector a[16], b[16];
      for (int j = 0; j < 16; ++j) a[j] = *(const Loosely *)(from + (i + j) * step + k);
      lay_between(a, b); lay_between(b, a); lay_between(a, b); lay_between(b, a);
      for (int j = 0; j < 16; ++j) *(Vector *)(to + (k + j) * N + i) = a[j];
    }
    for (; k < columns; ++k)
      for (int j = 0; j < 16; ++j) to[k * N + i + j] = from[(i + j) * step + k];
  }
  for (; i < rows; ++i)
    for (i64 k = 0; k < columns; ++k) to[k * N + i] = from[i * step + k];
}
#endif
extern "C" void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
extern "C" int omp_get_max_threads(void);
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
typedef void (*Part)(char **, i64, i64);
struct Job { Part part; char **p; i64 total; };
static void work(void *data) {
  Job *job = (Job *)data;
  i64 n = omp_get_num_threads(), k = omp_get_thread_num();
  i64 begin = job->total * k / n, end = job->total * (k + 1) / n;
  if (begin < end) job->part(job->p, begin, end);
}
// Run a part over [0, total) on as many threads as torch would use, and as the work is worth.
ONCE static void run(Part part, char **p, i64 total, i64 worth) {
  i64 threads = omp_get_max_threads();
  if (threads > worth) threads = worth;
  if (threads > total) threads = total;
  if (threads <= 1) { part(p, 0, total); return; }
  Job job = {part, p, total};
  GOMP_parallel(work, &job, (unsigned)threads, 0);
}
#ifdef UNDERTOW_PART
extern SHARED i64 fault;
#else
// Set by any thread that meets an index out of range (1; 3 where eager raises RuntimeError for it) or
// divides by zero (2).
SHARED i64 fault;
#endif
// An index that must be in [0, n), and one that may also be counted from the end.
INLINE i64 checked(i64 i, i64 n, i64 otherwise) {
  bool wrong = (i < 0) | (i >= n);
  if (__builtin_expect(wrong, 0)) { fault = otherwise; i = 0; }
  return i;
}
INLINE i64 within(i64 i, i64 n) { return checked(i, n, 1); }
INLINE i64 inside(i64 i, i64 n) { return checked(i, n, 3); }
INLINE i64 bound(i64 i, i64 n) { return within(i < 0 ? i + n : i, n); }
template <class T> INLINE T divisor(T b) {
  if (__builtin_expect(b == (T)0, 0)) { fault = 2; b = (T)1; }
  return b;
}
#ifdef UNDERTOW_PART
extern "C" i64 take_fault(void);
#else
extern "C" i64 take_fault(void) { i64 was = fault; fault = 0; return was; }
#endif

// Many kernels of one structure as one: their iterations are laid end to end and shared out.
struct Many { Part part; char **p; const i32 *slots; i64 width; const i64 *ends; i64 count; };
static void part_many(char **data, i64 begin, i64 end) {
  Many *m = (Many *)data;
  char *q[128];
  i64 low = 0, high = m->count - 1;
  while (low < high) {  // the first kernel that ends after begin
    i64 middle = (low + high) / 2;
    if (m->ends[middle] > begin) high = middle; else low = middle + 1;
  }
  for (i64 k = low; k < m->count && begin < end; ++k) {
    i64 start = k ? m->ends[k - 1] : 0;
    i64 stop = m->ends[k] < end ? m->ends[k] : end;
    for (i64 j = 0; j < m->width; ++j) q[j] = m->p[m->slots[k * m->width + j]];
    m->part(q, begin - start, stop - start);
    begin = stop;
  }
}
ONCE static void run_many(Part part, char **p, const i32 *slots, i64 width, const i64 *ends, i64 count,
                     i64 worth) {
  Many many = {part, p, slots, width, ends, count};
  run(part_many, (char **)&many, ends[count - 1], worth);
}
// Several kernels in one parallel region: every thread takes its share of each.
struct Item { Part part; char **p; i64 total; };
struct Combo { const Item *items; i64 count; };
static void work_combo(void *data) {
  Combo *combo = (Combo *)data;
  i64 n = omp_get_num_threads(), thread = omp_get_thread_num();
  for (i64 j = 0; j < combo->count; ++j) {
    const Item *item = combo->items + j;
    i64 k = (thread + j) % n;  // so that kernels of one iteration do not all fall on one thread
    i64 begin = item->total * k / n, end = item->total * (k + 1) / n;
    if (begin < end) item->part(item->p, begin, end);
  }
}
ONCE static void run_combo(const Item *items, i64 count, i64 worth) {
  i64 threads = omp_get_max_threads();
  if (threads > worth) threads = worth;
  if (threads <= 1) {
    for (i64 j = 0; j < count; ++j) items[j].part(items[j].p, 0, items[j].total);
    return;
  }
  Combo combo = {items, count};
  GOMP_parallel(work_combo, &combo, (unsigned)threads, 0);
}
