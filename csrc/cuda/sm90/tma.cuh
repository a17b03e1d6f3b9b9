// TMA by PTX: loads of boxes of tensors into shared memory, whose bytes, zeros among them, count at
// an mbarrier; stores of boxes; and the fence between them and what threads stored.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace cnn_engine::cuda {

// Has the copy engine bring bytes of this block's shared memory, published, to a block's of the
// cluster, whose barrier counts them.
__device__ inline void bulk_copy_to_cluster(std::uint32_t to, std::uint32_t from, int bytes,
                                            std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ inline void tma_load_tile(std::uint32_t to, const CUtensorMap* map, int column, int row,
                                     std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Positions of a window's kernel offset (down, right) over images [n, h, w, c], from that window on
// whose first kernel offset is at (n, h, w).
__device__ inline void tma_load_im2col(std::uint32_t to, const CUtensorMap* map, int c, int w,
                                       int h, int n, int right, int down, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(to),
      "l"(map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier),
      "h"(static_cast<unsigned short>(right)), "h"(static_cast<unsigned short>(down))
      : "memory");
}

// A box of images [n, h, w, c] from that position on, which may be beyond the image.
__device__ inline void tma_load_box(std::uint32_t to, const CUtensorMap* map, int c, int w, int h,
                                    int n, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier)
      : "memory");
}

// ---- stores from shared memory, which a thread waits for ----

__device__ inline void tma_store_tile(const CUtensorMap* map, std::uint32_t from, int column,
                                      int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
// A box of images [n, h, w, c], those of its positions that are in the image.
__device__ inline void tma_store_box(const CUtensorMap* map, std::uint32_t from, int c, int w,
                                     int h, int n) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(map),
      "r"(c), "r"(w), "r"(h), "r"(n), "r"(from)
      : "memory");
}
__device__ inline void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Returns once all that this thread stores was read; was written.
__device__ inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// What was stored in shared memory is seen by copies and products that are asked for later.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace cnn_engine::cuda
