// The C ABI of unwall's native core. One flat face, no C++ types, no exceptions across it.
//
// Conventions
//  - Work is asynchronous: a submit function returns a ticket (never 0) or 0 with `*err` filled.
//  - A ticket is an id, not a pointer: a stale or made-up id is answered with -EINVAL, never a crash.
//  - `after` names tickets that must finish first. If one of them failed, the new work does not run and
//    fails with the same error, so a chain read -> update -> write stops at its first fault.
//  - The caller keeps every buffer alive until the ticket has finished.
//  - Functions that return int give 0 or a negative errno; details are in `*err` where there is one.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UW_API __attribute__((visibility("default")))
#define UW_ABI_VERSION 6

typedef uint64_t uw_ticket;

typedef struct uw_error {
  int32_t code;       // a positive errno; 0 means no error
  int32_t op;         // uw_op of the request that failed, or 0
  int64_t offset;     // byte offset in `path` where it failed, or -1
  int64_t length;     // bytes of the request, or -1
  char path[512];     // file, or empty
  char message[256];  // one sentence
} uw_error;

enum uw_op { UW_READ = 1, UW_WRITE = 2 };
enum uw_dtype { UW_F32 = 0, UW_BF16 = 1, UW_F16 = 2 };
enum uw_master { UW_MASTER_F32 = 0, UW_MASTER_SPLIT = 1 };
enum uw_backend { UW_THREADS = 0, UW_URING = 1 };

UW_API int uw_abi_version(void);

// ---- tickets ------------------------------------------------------------------------------------------------
// 0: finished well. 1: still running after timeout_ns (negative: wait for ever). -errno: failed, `*err` says how.
UW_API int uw_ticket_wait(uw_ticket ticket, int64_t timeout_ns, uw_error* err);
// 1: finished (well or not). 0: still running. -EINVAL: not a ticket.
UW_API int uw_ticket_done(uw_ticket ticket);
// Monotonic times: when it was submitted, when its first piece started, when its last piece ended (0: not yet).
UW_API int uw_ticket_times(uw_ticket ticket, int64_t* submitted_ns, int64_t* started_ns, int64_t* finished_ns);
// Forgets the id. The work itself still runs to its end. A second release is -EINVAL.
UW_API int uw_ticket_release(uw_ticket ticket);
// Tickets that have not been released (for leak tests).
UW_API int64_t uw_ticket_count(void);
// A ticket that the caller finishes itself (a device callback, a test). `code` 0 is success, otherwise an errno.
UW_API uw_ticket uw_signal_create(void);
UW_API int uw_signal_set(uw_ticket ticket, int32_t code, const char* message);

// ---- worker pool --------------------------------------------------------------------------------------------
typedef struct uw_pool uw_pool;
// `cores` (may be null) lists the cores the workers are bound to, round robin.
UW_API uw_pool* uw_pool_create(int32_t threads, const int32_t* cores, int32_t n_cores, uw_error* err);
// Finishes what was submitted, then stops the workers.
UW_API int uw_pool_close(uw_pool* pool);
UW_API int uw_pool_threads(const uw_pool* pool);
// Name of the instruction set the kernels run with: "avx512", "avx2" or "baseline".
UW_API const char* uw_isa(void);
// Chooses another one (for tests): 0, or -EINVAL where this processor does not have it.
UW_API int uw_isa_select(const char* name);

typedef struct uw_adamw_args {
  void* param;         // float[n] (fp32 master) or bf16[n] (upper half of the split master)
  int16_t* remainder;  // split master: int16[n]; otherwise null
  void* copy;          // fp32 master: bf16[n] or f16[n] to write, or null
  float* exp_avg;      // float[n]
  float* exp_avg_sq;   // float[n]
  const void* grad;    // n elements of grad_dtype
  // Out of place: the new values go here, written past the cache, and the old ones above stay as they are. All null: in
  // place. Otherwise each array above that is given needs its output, and an output overlaps nothing, except that it may be
  // the very array that it replaces. (`copy` is an output in both cases, and out of place it overlaps nothing either.)
  void* out_param;
  int16_t* out_remainder;
  float* out_exp_avg;
  float* out_exp_avg_sq;
  int64_t n;
  int32_t master;      // uw_master
  int32_t grad_dtype;  // uw_dtype
  int32_t copy_dtype;  // uw_dtype
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale;  // multiplies each gradient element first (clipping, 1 / loss scale)
  int64_t step;       // 1 at the first update
} uw_adamw_args;

UW_API uw_ticket uw_adamw(uw_pool* pool, const uw_adamw_args* args, const uw_ticket* after, int32_t n_after, uw_error* err);
// The same in place with a way back (journal_impl.hpp): `journal` has uw_journal_bytes(n) bytes, starts a line of 64, and was
// zeroed once. Chunks with too many escapes are left as they are; uw_adamw_resolve knows of them.
UW_API int64_t uw_journal_bytes(int64_t n);
UW_API uw_ticket uw_adamw_journaled(uw_pool* pool, const uw_adamw_args* args, void* journal, const uw_ticket* after,
                                    int32_t n_after, uw_error* err);
// After a journaled update of the same `args` and the same gradients: every element gets its old bits back or, with `again`
// (the same arrays, other numbers or the same ones), those of that update. A second call finds nothing to do.
UW_API uw_ticket uw_adamw_resolve(uw_pool* pool, const uw_adamw_args* args, const uw_adamw_args* again, void* journal,
                                  const uw_ticket* after, int32_t n_after, uw_error* err);
// What the journal of `n` elements knows: elements that escaped, and elements that are left as they were.
UW_API int uw_journal_read(const void* journal, int64_t n, int64_t* escaped, int64_t* owing);
// *sum = sum of squares in double (finite elements and not alike), *nonfinite = how many elements are inf or NaN.
// The order of additions depends on n alone: the same bits for any thread count and instruction set.
UW_API uw_ticket uw_sum_squares(uw_pool* pool, const void* src, int32_t dtype, int64_t n, double* sum, int64_t* nonfinite,
                                const uw_ticket* after, int32_t n_after, uw_error* err);
// dst[i] += src[i] in float.
UW_API uw_ticket uw_accumulate(uw_pool* pool, float* dst, const void* src, int32_t dtype, int64_t n, const uw_ticket* after,
                               int32_t n_after, uw_error* err);
// dst[i] = (dst_dtype) src[i], round to nearest even.
UW_API uw_ticket uw_cast(uw_pool* pool, void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype, int64_t n,
                         const uw_ticket* after, int32_t n_after, uw_error* err);
// fp32 <-> (bf16 half, 16-bit remainder), lossless for every finite value.
UW_API uw_ticket uw_split(uw_pool* pool, void* half, int16_t* remainder, const float* src, int64_t n, const uw_ticket* after,
                          int32_t n_after, uw_error* err);
UW_API uw_ticket uw_join(uw_pool* pool, float* dst, const void* half, const int16_t* remainder, int64_t n,
                         const uw_ticket* after, int32_t n_after, uw_error* err);
UW_API uw_ticket uw_copy(uw_pool* pool, void* dst, const void* src, int64_t bytes, const uw_ticket* after, int32_t n_after,
                         uw_error* err);
// AdamW over lean states ([Note: lean format] in lean_impl.hpp). The arrays begin with a block of 64 elements, and those of the
// moments hold whole blocks. Outputs are the inputs themselves (in place) or overlap nothing.
typedef struct uw_lean_args {
  const void* half;         // bf16[n], the upper part of the 24-bit master
  const int8_t* remainder;  // int8[n]
  const uint16_t* moments;  // uint16[n rounded up to whole blocks]
  const void* grad;         // n elements of grad_dtype
  void* out_half;
  int8_t* out_remainder;
  uint16_t* out_moments;
  int64_t n;
  int32_t grad_dtype;  // uw_dtype
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale;
  int64_t step;
} uw_lean_args;
UW_API uw_ticket uw_lean_adamw(uw_pool* pool, const uw_lean_args* args, const uw_ticket* after, int32_t n_after, uw_error* err);
// exp_avg (or, where `squares`, exp_avg_sq) of n elements as floats, and back, rounded to nearest: exp_avg_sq is to be set
// first, because exp_avg is kept in proportion to it.
UW_API uw_ticket uw_lean_read(uw_pool* pool, float* dst, const uint16_t* moments, int32_t squares, int64_t n,
                              const uw_ticket* after, int32_t n_after, uw_error* err);
UW_API uw_ticket uw_lean_write(uw_pool* pool, uint16_t* moments, const float* src, int32_t squares, int64_t n,
                               const uw_ticket* after, int32_t n_after, uw_error* err);
// Blocks of 256 elements as small integers (`bits`: 8 or 4) with one float scale each, in `pieces` pieces of `n` elements (a
// multiple of 256): in each first all scales, then all codes (quantise_impl.hpp). Rounds to nearest, or with noise made of
// `seed` and an element's number. `residual` (or null) is added before, and gets what the rounding has left. Element by
// element.
UW_API uw_ticket uw_quantise(uw_pool* pool, void* packed, const void* src, void* residual, int32_t dtype, int64_t n,
                             int32_t pieces, int32_t bits, int32_t stochastic, uint32_t seed, const uw_ticket* after,
                             int32_t n_after, uw_error* err);
// The inverse. `divisor` 0: all pieces, side by side. Otherwise their sum, in float and in their order, over `divisor`.
UW_API uw_ticket uw_dequantise(uw_pool* pool, void* dst, const void* packed, int32_t dtype, int64_t n, int32_t pieces,
                               int32_t bits, float divisor, const uw_ticket* after, int32_t n_after, uw_error* err);
// Slows every job of the pool down to at most this many bytes per second of its traffic (0: full speed). For overlap tests.
UW_API int uw_pool_throttle(uw_pool* pool, double bytes_per_second);

// ---- checksums ----------------------------------------------------------------------------------------------
// By the calling thread, at once. `value` is the CRC-32 of what came before (0: nothing); gives that of both together.
UW_API uint32_t uw_crc32(const void* src, int64_t n, uint32_t value);
// Of bytes that are copied, of floats that are put together from two halves, of floats that are taken apart.
UW_API uint32_t uw_crc32_copy(void* dst, const void* src, int64_t n, uint32_t value);
UW_API uint32_t uw_crc32_join(float* dst, const void* half, const int16_t* remainder, int64_t n, uint32_t value);
UW_API uint32_t uw_crc32_split(void* half, int16_t* remainder, const float* src, int64_t n, uint32_t value);

// ---- memory -------------------------------------------------------------------------------------------------
// Exactly `bytes` (rounded up to a page) of zeroed memory, on huge pages where the system has them, touched by the
// pool's workers when `pool` is not null. Null with `*err` on failure.
UW_API void* uw_memory_map(int64_t bytes, uw_pool* pool, uw_error* err);
UW_API int uw_memory_unmap(void* address, int64_t bytes);

// ---- disk ---------------------------------------------------------------------------------------------------
typedef struct uw_disk uw_disk;

typedef struct uw_disk_options {
  int32_t backend;       // uw_backend
  int32_t threads;       // workers of the thread backend
  int32_t depth;         // blocks in flight at once (both backends)
  int32_t queue_blocks;  // blocks that may wait: a submit past this blocks until there is room
  int64_t block_bytes;   // requests are cut into blocks of this size, a multiple of 4096
} uw_disk_options;

// 1 where the library was built with liburing and this kernel lets us use it.
UW_API int uw_disk_has_uring(void);
UW_API uw_disk* uw_disk_create(const uw_disk_options* options, uw_error* err);
// Refuses new requests, finishes those in flight, closes the files.
UW_API int uw_disk_close(uw_disk* disk);
// One logical file striped over n_paths physical ones (one per drive) in units of stripe_bytes, preallocated to
// size_bytes in all (0: as it is). `descriptors`: files that the caller holds open already, one for each path, or NULL.
// They are opened again through the descriptor, so that whoever changes what a path means changes nothing here; the paths
// are then only names for messages. Without descriptors a path that is a symbolic link is refused (ELOOP). O_DIRECT where the
// file system takes it: *direct tells. Returns a file id >= 0, or -errno with `*err`.
UW_API int uw_disk_open(uw_disk* disk, const char* const* paths, const int32_t* descriptors, int32_t n_paths,
                        int64_t stripe_bytes, int64_t size_bytes, int32_t create, int32_t* direct, uw_error* err);
UW_API int uw_disk_resize(uw_disk* disk, int32_t file, int64_t size_bytes, uw_error* err);
UW_API int uw_disk_close_file(uw_disk* disk, int32_t file, uw_error* err);
// Offset, address and length are multiples of 4096, length > 0: anything else is refused with EINVAL.
UW_API uw_ticket uw_disk_submit(uw_disk* disk, int32_t op, int32_t file, int64_t offset, void* address, int64_t length,
                                const uw_ticket* after, int32_t n_after, uw_error* err);
// Blocks waiting or in flight now.
UW_API int64_t uw_disk_pending(uw_disk* disk);
// Fault injection for tests: from the `skip`-th block of `op` on, `count` blocks fail with errno `code`.
UW_API int uw_disk_fault(uw_disk* disk, int32_t op, int64_t skip, int64_t count, int32_t code);
// Slows blocks of `op` down to this many bytes per second in all (0: full speed). For overlap tests.
UW_API int uw_disk_throttle(uw_disk* disk, int32_t op, double bytes_per_second);

#ifdef __cplusplus
}
#endif
