// Matrix products from generated code: the BLAS that torch has loaded, called without torch between.
// Matrices are in rows; BLAS thinks in columns, so the operands change places.
typedef void (*Sgemm)(const char *, const char *, const i32 *, const i32 *, const i32 *, const f32 *,
                      const f32 *, const i32 *, const f32 *, const i32 *, const f32 *, f32 *,
                      const i32 *);
typedef void (*Dgemm)(const char *, const char *, const i32 *, const i32 *, const i32 *, const f64 *,
                      const f64 *, const i32 *, const f64 *, const i32 *, const f64 *, f64 *,
                      const i32 *);
typedef void (*Sbatch)(i32, const i32 *, const i32 *, const i32 *, const i32 *, const i32 *,
                       const f32 *, const f32 **, const i32 *, const f32 **, const i32 *,
                       const f32 *, f32 **, const i32 *, i32, const i32 *);
typedef void (*Dbatch)(i32, const i32 *, const i32 *, const i32 *, const i32 *, const i32 *,
                       const f64 *, const f64 **, const i32 *, const f64 **, const i32 *,
                       const f64 *, f64 **, const i32 *, i32, const i32 *);
#ifdef UNDERTOW_PART
extern SHARED Sgemm blas_s; extern SHARED Dgemm blas_d;
extern SHARED Sbatch blas_sb; extern SHARED Dbatch blas_db;
#else
SHARED Sgemm blas_s; SHARED Dgemm blas_d; SHARED Sbatch blas_sb; SHARED Dbatch blas_db;
extern "C" void bind_blas(void *s, void *d, void *sb, void *db) {
  blas_s = (Sgemm)s; blas_d = (Dgemm)d; blas_sb = (Sbatch)sb; blas_db = (Dbatch)db;
}
#endif
INLINE void blas(char ta, char tb, i32 m, i32 n, i32 k, f32 al, const f32 *a, i32 lda, const f32 *b,
                 i32 ldb, f32 be, f32 *c, i32 ldc) {
  blas_s(&ta, &tb, &m, &n, &k, &al, a, &lda, b, &ldb, &be, c, &ldc);
}
INLINE void blas(char ta, char tb, i32 m, i32 n, i32 k, f64 al, const f64 *a, i32 lda, const f64 *b,
                 i32 ldb, f64 be, f64 *c, i32 ldc) {
  blas_d(&ta, &tb, &m, &n, &k, &al, a, &lda, b, &ldb, &be, c, &ldc);
}
INLINE void blas_many(i32 ta, i32 tb, i32 m, i32 n, i32 k, f32 al, const f32 **a, i32 lda,
                      const f32 **b, i32 ldb, f32 be, f32 **c, i32 ldc, i32 count) {
  blas_sb(102, &ta, &tb, &m, &n, &k, &al, a, &lda, b, &ldb, &be, c, &ldc, 1, &count);
}
INLINE void blas_many(i32 ta, i32 tb, i32 m, i32 n, i32 k, f64 al, const f64 **a, i32 lda,
                      const f64 **b, i32 ldb, f64 be, f64 **c, i32 ldc, i32 count) {
  blas_db(102, &ta, &tb, &m, &n, &k, &al, a, &lda, b, &ldb, &be, c, &ldc, 1, &count);
}
// A kernel from one of its iterations on: for operands that are made a panel at a time.
struct From { Part part; char **p; i64 first; };
static void part_from(char **data, i64 begin, i64 end) {
  From *from = (From *)data;
  from->part(from->p, from->first + begin, from->first + end);
}
ONCE static void run_from(Part part, char **p, i64 first, i64 count, i64 worth) {
  From from = {part, p, first};
  run(part_from, (char **)&from, count, worth);
}
struct Operand { i64 offset, ld; bool turned; i64 batch; };

template <class T>
ONCE static void gemm(char *a, Operand x, char *b, Operand y, char *c, Operand z, i64 m, i64 n, i64 k,
                 T alpha, T beta) {
  blas(y.turned ? 'T' : 'N', x.turned ? 'T' : 'N', (i32)n, (i32)m, (i32)k, alpha,
       (T *)b + y.offset, (i32)y.ld, (T *)a + x.offset, (i32)x.ld, beta, (T *)c + z.offset,
       (i32)z.ld);
}
template <class T>
ONCE static void gemm_many(char *a, Operand x, char *b, Operand y, char *c, Operand z, i64 m, i64 n,
                      i64 k, T alpha, T beta, i64 count) {
  const T **as = (const T **)__builtin_alloca(3 * sizeof(T *) * (u64)count);
  const T **bs = as + count;
  T **cs = (T **)(bs + count);
  for (i64 i = 0; i < count; ++i) {
    as[i] = (T *)a + x.offset + i * x.batch;
    bs[i] = (T *)b + y.offset + i * y.batch;
    cs[i] = (T *)c + z.offset + i * z.batch;
  }
  blas_many(y.turned ? 112 : 111, x.turned ? 112 : 111, (i32)n, (i32)m, (i32)k, alpha, bs,
            (i32)y.ld, as, (i32)x.ld, beta, cs, (i32)z.ld, (i32)count);
}
// What a product is added to, spread over the result; rows of all matrices one after the other.
template <class T> struct Spread { const T *from; T *to; i64 rows, n, batch, row, column; };
template <class T> static void spread_part(char **data, i64 begin, i64 end) {
  Spread<T> *s = (Spread<T> *)data;
  for (i64 i = begin; i < end; ++i) {
    const T *from = s->from + i / s->rows * s->batch + i % s->rows * s->row;
    T *to = s->to + i * s->n;
    if (s->column == 1) for (i64 j = 0; j < s->n; ++j) to[j] = from[j];
    else for (i64 j = 0; j < s->n; ++j) to[j] = from[j * s->column];
  }
}
template <class T>
ONCE static void spread(char *from, i64 offset, i64 batch, i64 row, i64 column, char *to, i64 count,
                   i64 rows, i64 n, i64 worth) {
  if (from == to) return;  // the result took the memory of what it is added to
  Spread<T> s = {(T *)from + offset, (T *)to, rows, n, batch, row, column};
  run(spread_part<T>, (char **)&s, count * rows, worth);
}
