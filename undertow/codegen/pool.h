// Memory for results, kept when they are freed: pages that are mapped and warm. No more is held than
// was once in use. Tensors come as DLPack capsules whose deleter gives the block back.
typedef int i32; typedef long i64; typedef unsigned long u64; typedef unsigned char u8;
typedef unsigned short u16;
extern "C" void *aligned_alloc(u64, u64);
extern "C" void free(void *);
extern "C" int madvise(void *, u64, int);
extern "C" void *PyCapsule_New(void *, const char *, void (*)(void *));

struct Device { i32 type, id; };
struct Type { u8 code, bits; u16 lanes; };
struct Tensor { void *data; Device device; i32 ndim; Type type; i64 *shape, *strides; u64 offset; };
struct Managed { Tensor tensor; void *context; void (*deleter)(Managed *); };
struct Description { i64 nbytes; i32 ndim; Type type; i64 *shape, *strides; };
struct Block { void *data; i64 size; };

enum { MOST = 256, HUGE_ = 2 << 20 };
static Block idle[MOST];
static i64 count, idle_nbytes, live_nbytes, peak_nbytes;
static int lock_;
static void lock() { while (__atomic_exchange_n(&lock_, 1, __ATOMIC_ACQUIRE)) ;; }
static void unlock() { __atomic_store_n(&lock_, 0, __ATOMIC_RELEASE); }

static void drop(i64 k) {
  free(idle[k].data);
  idle_nbytes -= idle[k].size;
  idle[k] = idle[--count];
}
static i64 rounded(i64 nbytes) { return (nbytes + 4095) / 4096 * 4096; }
static void *take(i64 size) {
  i64 best = -1;
  for (i64 k = count - 1; k >= 0; --k)
    if (idle[k].size == size) { best = k; break; }  // the last freed is the warmest
  void *data = 0;
  if (best >= 0) {
    data = idle[best].data;
    idle_nbytes -= size;
    for (i64 k = best; k + 1 < count; ++k) idle[k] = idle[k + 1];
    --count;
  }
  live_nbytes += size;
  if (live_nbytes > peak_nbytes) peak_nbytes = live_nbytes;
  if (!data) {
    while (count && live_nbytes + idle_nbytes > peak_nbytes) drop(0);
    data = aligned_alloc(size >= 2 * HUGE_ ? HUGE_ : 64, size);
    if (data && size >= 2 * HUGE_) madvise(data, size, 14);  // MADV_HUGEPAGE
  }
  return data;
}
static void give(void *data, i64 size) {
  live_nbytes -= size;
  if (count == MOST) drop(0);
  idle[count].data = data;
  idle[count++].size = size;
  idle_nbytes += size;
}
static void deleter(Managed *managed) {
  lock();
  give(managed->tensor.data, (i64)managed->context);
  unlock();
  free(managed);
}
// A capsule with a tensor of this description; 0 if there is no memory.
extern "C" void *pool_tensor(Description *d) {
  i64 size = rounded(d->nbytes);
  Managed *managed = (Managed *)aligned_alloc(64, 128);
  if (!managed) return 0;
  lock();
  void *data = take(size);
  unlock();
  if (!data) { free(managed); return 0; }
  managed->tensor.data = data;
  managed->tensor.device.type = 1;
  managed->tensor.device.id = 0;
  managed->tensor.ndim = d->ndim;
  managed->tensor.type = d->type;
  managed->tensor.shape = d->shape;
  managed->tensor.strides = d->strides;
  managed->tensor.offset = 0;
  managed->context = (void *)size;
  managed->deleter = deleter;
  return PyCapsule_New(managed, "dltensor", 0);
}
// Somebody else is about to allocate: idle blocks that would make the whole larger than what was once
// in use go back to the system.
extern "C" void pool_room(i64 nbytes) {
  lock();
  while (count && live_nbytes + idle_nbytes + nbytes > peak_nbytes) drop(0);
  unlock();
}
extern "C" void pool_clear(void) {
  lock();
  while (count) drop(count - 1);
  peak_nbytes = live_nbytes;
  unlock();
}
extern "C" i64 pool_nbytes(i64 which) {
  return which == 0 ? live_nbytes : which == 1 ? idle_nbytes : peak_nbytes;
}
