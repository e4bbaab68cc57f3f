// Counts what a process has allocated and the most it had at once; to be loaded before others
// (LD_PRELOAD). Resident memory, which the system counts, is in pages and depends on what the
// allocator keeps: for steps of a few megabytes it differs by tenths of one from run to run.
typedef unsigned long size;
extern "C" {
void *dlsym(void *, const char *) noexcept;
size malloc_usable_size(void *) noexcept;
void *memcpy(void *, const void *, size) noexcept;
}
static long now, peak;
static void *(*next_malloc)(size);
static void *(*next_calloc)(size, size);
static void *(*next_realloc)(void *, size);
static void *(*next_aligned)(size, size);
static int (*next_memalign)(void **, size, size);
static void (*next_free)(void *);
alignas(64) static char early[1 << 16];  // for dlsym itself, before there is an allocator
static size used;

template <class F> static void find(F &f, const char *name) {
  if (!f) f = (F)dlsym((void *)-1l, name);  // RTLD_NEXT
}
static bool is_early(void *p) { return (char *)p >= early && (char *)p < early + sizeof early; }
// What was asked for of large aligned blocks: the allocator maps up to an alignment more, which
// nobody touches.
enum { MOST = 4096, LARGE = 1 << 20 };
static struct { void *block; long nbytes; } asked[MOST];
static int lock_;
static void lock() { while (__atomic_exchange_n(&lock_, 1, __ATOMIC_ACQUIRE)) {} }
static void unlock() { __atomic_store_n(&lock_, 0, __ATOMIC_RELEASE); }
static void remember(void *p, long nbytes) {
  if (!p || nbytes < LARGE) return;
  lock();
  for (auto &entry : asked)
    if (!entry.block) { entry.block = p, entry.nbytes = nbytes; break; }
  unlock();
}
static long size_of(void *p, bool forget) {
  long found = (long)malloc_usable_size(p);
  if (found < LARGE) return found;
  lock();
  for (auto &entry : asked)
    if (entry.block == p) {
      found = entry.nbytes;
      if (forget) entry.block = 0;
      break;
    }
  unlock();
  return found;
}
static void *add(void *p) {
  if (!p) return p;
  long n = __atomic_add_fetch(&now, size_of(p, false), __ATOMIC_RELAXED);
  long most = __atomic_load_n(&peak, __ATOMIC_RELAXED);
  while (n > most && !__atomic_compare_exchange_n(&peak, &most, n, true, 0, 0)) {}
  return p;
}
static void drop(void *p) {
  __atomic_sub_fetch(&now, size_of(p, true), __ATOMIC_RELAXED);
}
extern "C" {
void *malloc(size n) noexcept {
  find(next_malloc, "malloc");
  return add(next_malloc(n));
}
void *calloc(size a, size b) noexcept {
  static bool finding;
  if (!next_calloc) {
    if (finding) {
      void *p = early + used;
      used += (a * b + 63) / 64 * 64;
      return p;
    }
    finding = true;
    find(next_calloc, "calloc");
  }
  return add(next_calloc(a, b));
}
void *realloc(void *p, size n) noexcept {
  find(next_realloc, "realloc");
  if (is_early(p)) return memcpy(malloc(n), p, n);
  if (p) drop(p);
  void *q = next_realloc(p, n);
  if (q || n) add(q ? q : p);
  return q;
}
void *aligned_alloc(size a, size n) noexcept {
  find(next_aligned, "aligned_alloc");
  void *p = next_aligned(a, n);
  remember(p, (long)n);
  return add(p);
}
void *memalign(size a, size n) noexcept { return aligned_alloc(a, n); }
int posix_memalign(void **p, size a, size n) noexcept {
  find(next_memalign, "posix_memalign");
  int failed = next_memalign(p, a, n);
  if (!failed) {
    remember(*p, (long)n);
    add(*p);
  }
  return failed;
}
void free(void *p) noexcept {
  if (!p || is_early(p)) return;
  find(next_free, "free");
  drop(p);
  next_free(p);
}
long heap_now() { return now; }
long heap_peak() { return peak; }
void heap_reset() { peak = now; }
}
